"""What a reply costs, for each unit that is protected: said before the reply is made, from public facts alone."""

from dataclasses import dataclass

from cloister.client.data import task_of, units_dealt
from cloister.client.foreseen import by_own_roster
from cloister.client.node import Node, NodeConfig
from cloister.client.request import Request, TrainRequest
from cloister.client.training.plan import requested_plan
from cloister.client.units import size_of
from cloister.config.run import TaskConfig
from cloister.core.arrays import Layout
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.accounting.vocabulary import Unit
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.tasks.training.plan import TrainingPlan

SCORES = "scores"
"""The mechanism under which un-noised scores are entered in a ledger."""
PROMISED = "as the server promised"
SHARED = "secure-aggregation"
"""The mechanism under which a sum is entered that this client adds a share of the noise to."""
GROUPED = "dp-sgd, groups by "
"""How the mechanism of steps begins that protect groups; the array that says whose a row is follows."""
FURTHER = "in the same message"
"""The mechanism under which all but the first release of a reply about one unit are entered."""


@dataclass(frozen=True)
class Charge:
    """Releases about one unit that a reply is about to make.

    Attributes:
        unit: whose protection they are about.
        events: what happens.
        mechanism: by which, for whoever reads the ledger.
        clip: largest L2 norm of one unit's contribution; 0: none.
    """

    unit: Unit
    events: tuple[Event, ...]
    mechanism: str = ""
    clip: float = 0.0


def charges_of(request: Request, node: Node) -> list[Charge]:
    """The releases of a reply, about the client and about its examples or groups.

    Args:
        request: that the reply answers.
        node: that answers.

    Raises:
        PrivacyError: the node does not state how much data it has, and DP-SGD would show it.
    """
    unit = unit_of(request, node)
    if not isinstance(request, TrainRequest):
        scores = (Unaccounted("scores left without noise"),)
        return [Charge("client", scores, SCORES), Charge(unit, scores, SCORES)]
    if request.config.secure_aggregation.enabled:
        return _of_shared_noise(request, node, unit)
    if request.config.privacy.client.clips_gradients:
        return [_of_promise(request, node), _of_steps(request, node, unit)]
    return _of_local_noise(request, node, unit)


def unit_of(request: Request, node: Node) -> Unit:
    """Whom the node protects beside itself: groups where it or the run names them, else examples.

    Noise on everything that a client sends protects its groups too: it costs them what it costs an example.

    Args:
        request: of the server.
        node: may name groups.
    """
    return "group" if request.config.task.group or node.config.group else "example"


def _of_promise(request: TrainRequest, node: Node) -> Charge:
    """What the server says about its own noise, where the site's policy does not leave that out."""
    if node.policy is None or not node.policy.mechanisms or node.policy.believed:
        return Charge("client", request.promise, PROMISED)
    return Charge("client", (Unaccounted("the policy of this node counts on no noise of the server's"),), PROMISED)


def _of_shared_noise(request: TrainRequest, node: Node, unit: Unit) -> list[Charge]:
    """The sum that this client's masked update goes into, with the noise that it knows its part of.

    The run says how many of the others may work with the server. Unless a rule of the node says at least how many, what
    covers its examples may be its own share alone.
    """
    request = by_own_roster(request, node)
    client = Charge("client", request.promise, SHARED, request.bound)
    if node.policy is None or not node.policy.min_colluding:
        return [client, Charge(unit, (Unaccounted("no policy of this node has min-colluding"),), SHARED)]
    return [client, Charge(unit, tuple(event.replaced() for event in request.promise), SHARED, request.bound)]


def _of_steps(request: TrainRequest, node: Node, unit: Unit) -> Charge:
    """DP-SGD, which protects each unit against everybody."""
    privacy, mechanism = request.config.privacy, request.config.privacy.dp_sgd.mechanism()
    steps = planned_steps(request, node)
    events = privacy.circumstances.events(mechanism.caveats(), lambda: [steps.event(mechanism.noise_multiplier)])
    return Charge(unit, events, steps_by(request.config.task.group), mechanism.clipping_norm_in(request.round))


def steps_by(group: str) -> str:
    """What a ledger calls the steps of DP-SGD.

    Args:
        group: the array that says whose a row is; empty: each is its own.
    """
    return GROUPED + group if group else "dp-sgd"


def _of_local_noise(request: TrainRequest, node: Node, unit: Unit) -> list[Charge]:
    """Noise on what is sent, which protects everything the client holds; or none, and what the server promises."""
    privacy, mechanism = request.config.privacy, request.config.privacy.client.noise_on_update
    name, clip = privacy.client.name, privacy.client.bound
    if mechanism is None:
        unprotected = Unaccounted(f"privacy.client is {name!r}: the server sees models trained without noise")
        return [_of_promise(request, node), Charge(unit, (unprotected,))]
    parameters = Layout.of(request.models[0]).size
    events = privacy.circumstances.events(mechanism.caveats(), lambda: mechanism.events(parameters))
    clip = 0.0 if isinstance(events[0], Unaccounted) else clip
    return [
        Charge("client", events, name, clip),
        Charge(unit, tuple(event.replaced() for event in events), name, clip),
    ]


def planned_steps(request: TrainRequest, node: Node) -> LocalSteps:
    """The private steps that a training request asks for, from the size that the node states.

    Args:
        request: of the server.
        node: that answers.

    Raises:
        PrivacyError: the node does not state it, or batches would show the true one.
    """
    plan, sampling = plan_of(request, node), request.config.privacy.dp_sgd.batch_sampling
    if size_of(node.config) and sampling != "poisson":
        raise PrivacyError(
            f"privacy.batch-sampling = {sampling!r} would show how many examples this node has; use 'poisson'"
        )
    return LocalSteps(plan.public_size, plan.batch_size, plan.epochs, sampling)


def plan_of(request: TrainRequest, node: Node) -> TrainingPlan:
    """How the node trains for a request; of a size only where DP-SGD needs one.

    Args:
        request: of the server.
        node: whose owner makes its shuffles independent of other clients'.
    """
    clips = request.config.privacy.client.clips_gradients
    size = (size_of(node.config) or dealt(request.config.task, node.config, request.seed)) if clips else 0
    return requested_plan(request, task_of(request.config.task), node.owner, size)


def dealt(config: TaskConfig, node: NodeConfig, seed: int) -> int:
    """How many units a simulation deals a client: public, like the partition.

    Args: as `local_data`.
    """
    return max(1, len(units_dealt(config, node, seed)))
