"""Privacy cost of a reply for each protected unit, computed before the reply from public facts alone."""

from dataclasses import dataclass

from cloister.client.data import dealt
from cloister.client.dp_sgd import size_of
from cloister.client.enforce import by_own_roster
from cloister.client.node import Node
from cloister.client.request import Request, TrainRequest
from cloister.client.trainers import requested_plan
from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.accounting.vocabulary import Unit
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Layout
from cloister.utils.errors import PrivacyError

SCORES = "scores"
"""Mechanism of ledger entries for scores without noise."""
PROMISED = "as the server promised"
NO_MINIMUM = "no policy of this node has min-colluding"
SHARED = "secure-aggregation"
"""Mechanism of ledger entries for a secure sum in which this client adds a share of the noise."""
GROUPED = "dp-sgd, groups by "
"""Prefix of the mechanism for DP-SGD steps that protect groups; the name of the groups' array follows."""
FURTHER = "in the same message"
"""Mechanism of ledger entries for the second and further releases of a reply about one unit."""


@dataclass(frozen=True)
class PrivacyCost:
    """Releases about one unit in a future reply.

    Attributes:
        unit: the protected unit.
        events: the privacy events.
        mechanism: name of the mechanism, for readers of the ledger.
        clip: largest L2 norm of one unit's contribution; 0: none.
    """

    unit: Unit
    events: tuple[Event, ...]
    mechanism: str = ""
    clip: float = 0.0


def privacy_costs_of(request: Request, node: Node) -> list[PrivacyCost]:
    """Return the releases of a reply, about the client and its units.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        PrivacyError: the node states no public size, and DP-SGD would reveal the true one.
    """
    unit = unit_of(request, node)
    if not isinstance(request, TrainRequest):
        scores = (Unaccounted("scores left without noise"),)
        return [PrivacyCost("client", scores, SCORES), PrivacyCost(unit, scores, SCORES)]
    if shared := request.config.shared_release:  # a sum to which this node adds a share of the noise
        request = by_own_roster(request, node)
        name, bound, of_client = SHARED, request.bound, request.bound
        if is_step := request.config.sums_gradients:
            planned_steps(request, node)  # refuses a node that states no size
            name, bound, of_client = steps_by(request.config.task.group), shared.bound_in(request.round), 0.0
        events = shared.unit_events(Layout.of(request.models[0]), len(request.by_provisioner))
        if not (node.policy and node.policy.min_colluding) and (node.config.data_path or not is_step):
            # The run alone states how many members collude: the node's own share of noise may be the only one that
            # covers its examples. A simulated node that sums gradients relies on the run.
            events, bound = (Unaccounted(NO_MINIMUM),), 0.0
        return [PrivacyCost("client", request.promise, SHARED, of_client), PrivacyCost(unit, events, name, bound)]
    privacy, mechanism = request.config.privacy, request.config.privacy.client.noise_on_update
    if privacy.client.clips_gradients:
        steps, own = planned_steps(request, node), privacy.dp_sgd.mechanism()
        events = privacy.circumstances.events(own.caveats(), lambda: [steps.event(own.noise_multiplier)])
        name = steps_by(request.config.task.group)
        return [_of_promise(request, node), PrivacyCost(unit, events, name, own.clipping_norm_in(request.round))]
    name = privacy.client.name
    if mechanism is None:
        unprotected = Unaccounted(f"privacy.client is {name!r}: the server sees models trained without noise")
        return [_of_promise(request, node), PrivacyCost(unit, (unprotected,))]
    parameters = Layout.of(request.models[0]).size
    events = privacy.circumstances.events(mechanism.caveats(), lambda: mechanism.events(parameters))
    clip = 0.0 if isinstance(events[0], Unaccounted) else privacy.client.bound
    of_unit = tuple(event.replaced() for event in events)
    return [PrivacyCost("client", events, name, clip), PrivacyCost(unit, of_unit, name, clip)]


def unit_of(request: Request, node: Node) -> Unit:
    """Return the protected unit beside the client.

    It is a group if the node or the run names groups, else an example. Noise on everything that a client sends protects
    its groups too, at the cost for an example.

    Args:
        request: of the server.
        node: may name groups.
    """
    return "group" if request.config.task.group or node.config.group else "example"


def _of_promise(request: TrainRequest, node: Node) -> PrivacyCost:
    """Return the charge for the server's stated noise.

    If the site's policy does not permit relying on it, the charge is unaccounted.
    """
    if node.policy is None or not node.policy.mechanisms or node.policy.believed:
        return PrivacyCost("client", request.promise, PROMISED)
    return PrivacyCost("client", (Unaccounted("the policy of this node counts on no noise of the server's"),), PROMISED)


def steps_by(group: str) -> str:
    """Return the name of DP-SGD steps in a ledger.

    Args:
        group: the array with the group of each row; empty: each row is its own unit.
    """
    return GROUPED + group if group else "dp-sgd"


def planned_steps(request: TrainRequest, node: Node) -> LocalSteps:
    """Return the private steps of a request, from the node's public size.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        PrivacyError: the node states no size, or the batches would reveal the true one.
    """
    plan, dp_sgd = plan_of(request, node), request.config.privacy.dp_sgd
    sampling = dp_sgd.batch_sampling
    if size_of(node.config) and sampling != "poisson":
        raise PrivacyError(
            f"privacy.batch-sampling = {sampling!r} would show how many examples this node has; use 'poisson'"
        )
    return dp_sgd.steps(plan.public_size, plan.batch_size, plan.epochs)


def plan_of(request: TrainRequest, node: Node) -> TrainingPlan:
    """Return the training plan for a request.

    It has a size only where DP-SGD requires one.

    Args:
        request: of the server.
        node: its owner makes its shuffles independent of other clients'.
    """
    size = public_units(request, node) if request.config.privacy.client.clips_gradients else 0
    return requested_plan(request, node.owner, size)


def public_units(request: TrainRequest, node: Node) -> int:
    """Return the public number of units for DP-SGD.

    Args:
        request: of the server.
        node: states it, or is simulated.

    Raises:
        PrivacyError: the node has data of its own and states no size.
    """
    return size_of(node.config) or dealt(request.config.task, node.config, request.seed)
