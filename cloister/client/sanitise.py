"""Laplace noise on what a client sends: the last thing that touches a trained model before it leaves.

    δ = trained - θ_j,   ε = p / (ν·r),   r = ‖δ‖ (published) or a radius fixed beforehand,   sent = trained + noise

Within the distance r of what was trained, ε·r = p/ν is the most by which likelihoods differ.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict, UserConfig
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from cloister.client.books import MAX_LEAKAGE
from cloister.client.handlers import hypotheses_of, run_config
from cloister.client.leakage import Spending, limit_of, own_limit, spending_of
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.config import PrivacyConfig
from cloister.core.errors import BudgetExhausted, ConfigError, PrivacyError
from cloister.core.wire import ARRAYS, CHOSEN, CONFIG, METRICS, ROUND
from cloister.privacy.events import Laplace, Unaccounted
from cloister.privacy.laplace import LaplaceNoise

MIN_RADIUS = "min-radius"
"""The smallest radius that a node with a limit of its own takes part under, in its configuration."""
BLOCK = 1 << 14
"""Parameters that a distance is computed over at a time."""


def sanitise(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Noise a trained model by `privacy.client = 'laplace'`, and let nothing else of the reply through.

    A release that would pass the limit of leakage is not made, nor trained for. A node with a limit of its own takes
    part in nothing that leaves it without this noise.

    Raises:
        BudgetExhausted: the client abstains; the server sees an error reply that says so.
        PrivacyError: the model cannot be noised.
    """
    config, kind = run_config(context), message.metadata.message_type
    limit = limit_of(config.privacy, context.node_config)
    if kind not in (MessageType.TRAIN, MessageType.EVALUATE):
        return call_next(message, context)
    if config.privacy.client != "laplace" or kind == MessageType.EVALUATE:
        if own_limit(context.node_config):
            raise BudgetExhausted(f"this node has a limit ({MAX_LEAKAGE}), and this would leave without noise")
        return call_next(message, context)
    hypotheses = hypotheses_of(message)
    spending = spending_of(context, config.task.name, limit)
    refuse_free_radius(config.privacy, context.node_config)
    seeded = config.privacy.noise_seed != -1
    cost = leakage_of(Layout.of(hypotheses[0]).size, config.privacy.client_noise_multiplier)
    spending.require(math.inf if seeded else cost)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    trained, start = from_record(reply.content.array_records[ARRAYS]), hypotheses[_chosen(reply, len(hypotheses))]
    noise = LaplaceNoise(_seed(config.privacy, context, message))
    where = (str(message.metadata.run_id), int(message.content.config_records[CONFIG][ROUND]))  # type: ignore[arg-type]
    sent = to_record(released(trained, start, config.privacy, noise, spending, where))
    return Message(RecordDict({ARRAYS: sent, METRICS: MetricRecord()}), reply_to=message)


def refuse_free_radius(privacy: PrivacyConfig, node: UserConfig) -> None:
    """Refuse a radius that the server may choose as small as it likes: noise is in proportion, and the leakage is not.

    Raises:
        PrivacyError: this node has a limit of its own, and the run's radius is not of at least its `min-radius`.
    """
    least = node.get(MIN_RADIUS, 0.0)
    if isinstance(least, bool) or not isinstance(least, int | float) or least < 0:
        raise ConfigError(f"{MIN_RADIUS} = {least!r} in the node configuration must be a number of at least 0")
    if privacy.radius and own_limit(node) and not 0 < least <= privacy.radius:
        raise PrivacyError(
            f"privacy.radius = {privacy.radius:g} is not of at least the {MIN_RADIUS} of this node, which has a limit "
            f"({MAX_LEAKAGE}): a limit within a radius of any size bounds nothing"
        )


def leakage_of(parameters: int, noise_multiplier: float) -> float:
    """p/ν, what one release leaks within its neighbourhood, whatever that is; ∞ without noise."""
    return parameters / noise_multiplier if noise_multiplier else math.inf


def released(
    trained: Mapping[str, NDArray],
    start: Mapping[str, NDArray],
    privacy: PrivacyConfig,
    noise: LaplaceNoise,
    spending: Spending,
    where: tuple[str, int],
) -> dict[str, NDArray]:
    """trained + noise, counted before the noise is drawn.

    A part that training has not moved has nothing to hide behind: where its own movement is the radius, it is sent as
    it came, and nothing is counted for it.

    Args:
        trained, start: the arrays after and before training.
        privacy: ν, the radius, and whether every array has its own noise.
        noise, spending: of this client.
        where: run and round.

    Raises:
        PrivacyError: an array is not finite, or the arrays are not those that training began with.
        BudgetExhausted: another process has used the limit up meanwhile.
    """
    sent = _checked(trained, start)
    multiplier = privacy.client_noise_multiplier
    if privacy.noise_seed != -1:
        spending.release(Unaccounted("the noise is seeded: whoever knows privacy.noise-seed can remove it"), *where)
    if not multiplier:
        spending.release(Unaccounted("privacy.client-noise-multiplier is 0: there is no noise"), *where)
        return sent
    for names in [[name] for name in sent] if privacy.per_layer else [list(sent)]:
        radius = privacy.radius or distance(names, sent, start)
        if not radius:
            continue
        epsilon = sum(sent[name].size for name in names) / (multiplier * radius)
        if privacy.noise_seed == -1:
            spending.release(Laplace(epsilon, radius), *where)
        noise.add(tuple(sent[name].reshape(-1) for name in names), epsilon)
    return sent


def _checked(trained: Mapping[str, NDArray], start: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """A copy of the trained arrays to be noised, if ε can be about them: the same numbers of parameters, all finite."""
    if {name: array.shape for name, array in trained.items()} != {name: array.shape for name, array in start.items()}:
        raise PrivacyError("the trained arrays are not those that training began with: nothing is released")
    if not all(np.isfinite(array).all() for array in trained.values()):
        raise PrivacyError("training has diverged: there is no finite model to release")
    return {name: np.array(trained[name]) for name in start}


def distance(names: Iterable[str], one: Mapping[str, NDArray], other: Mapping[str, NDArray]) -> float:
    """The Euclidean distance of two models over these arrays, in double precision, without copies of them."""
    total = 0.0
    for name in names:
        a, b = one[name].reshape(-1), other[name].reshape(-1)
        for start in range(0, len(a), BLOCK):
            piece = np.subtract(a[start : start + BLOCK], b[start : start + BLOCK], dtype=np.float64)
            total += float(np.vdot(piece, piece))
    return math.sqrt(total)


def _chosen(reply: Message, hypotheses: int) -> int:
    """From which hypothesis the client trained.

    Raises:
        PrivacyError: it does not say, or it is none of them: how far it moved is unknown.
    """
    metrics = reply.content.metric_records.get(METRICS, MetricRecord())
    chosen = metrics.get(CHOSEN, 0 if hypotheses == 1 else None)
    if not isinstance(chosen, int) or not 0 <= chosen < hypotheses:
        raise PrivacyError("the trainer does not say which hypothesis it began with: nothing is released")
    return chosen


def _seed(privacy: PrivacyConfig, context: Context, message: Message) -> int | None:
    """None, unless noise is to be repeated; then one for each client and round."""
    if privacy.noise_seed == -1:
        return None
    owner = context.node_config.get("partition-id", context.node_id)
    words = [privacy.noise_seed, int(owner), int(message.content.config_records[CONFIG][ROUND])]  # type: ignore[arg-type]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
