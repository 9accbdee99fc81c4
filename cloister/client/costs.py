"""Privacy cost of a reply for each protected unit, computed before the reply from public facts alone."""

from dataclasses import dataclass, replace

from cloister.client.data import task_of, units_dealt
from cloister.client.dp_sgd import size_of
from cloister.client.enforce import NO_MINIMUM, by_own_roster, multiplier_of_steps, why_not_relied_on
from cloister.client.node import Node, NodeConfig
from cloister.client.request import Request, TrainRequest
from cloister.client.trainers import requested_plan
from cloister.config.run import TaskConfig
from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.accounting.vocabulary import Unit
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Layout
from cloister.utils.errors import PrivacyError

SCORES = "scores"
"""Mechanism of ledger entries for scores without noise."""
PROMISED = "as the server promised"
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
    if request.config.secure_aggregation.enabled and not request.config.shares_steps:
        request = by_own_roster(request, node)
        # Unless a policy sets a minimum of colluding members, the run alone states it. The node's own share of noise
        # may then be the only one that covers its examples.
        events: tuple[Event, ...] = (Unaccounted(NO_MINIMUM),)
        clip = 0.0
        if node.policy is not None and node.policy.min_colluding:
            events, clip = tuple(event.replaced() for event in request.promise), request.bound
        return [PrivacyCost("client", request.promise, SHARED, request.bound), PrivacyCost(unit, events, SHARED, clip)]
    privacy, mechanism = request.config.privacy, request.config.privacy.client.noise_on_update
    if privacy.client.clips_gradients:
        steps, own = planned_steps(request, node), privacy.dp_sgd.mechanism()
        multiplier, caveats = own.noise_multiplier, own.caveats()
        if request.config.shares_steps:
            multiplier = multiplier_of_steps(by_own_roster(request, node))
            caveats += [relied] if (relied := why_not_relied_on(node)) else []
        events = privacy.circumstances.events(caveats, lambda: [steps.event(multiplier)])
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
    clips = request.config.privacy.client.clips_gradients
    size = (size_of(node.config) or dealt(request.config.task, node.config, request.seed)) if clips else 0
    plan = requested_plan(request, task_of(request.config.task), node.owner, size)
    if not request.config.shares_steps:
        return plan
    step = request.config.privacy.dp_sgd.steps(size, plan.batch_size, plan.epochs)
    return replace(plan, batch_size=step.batch_size, epochs=step.epochs)


def dealt(config: TaskConfig, node: NodeConfig, seed: int) -> int:
    """Return the number of units that a simulation assigns, at least 1.

    It is public, like the partition.

    Args: as `local_data`.
    """
    return max(1, len(units_dealt(config, node, seed)))
