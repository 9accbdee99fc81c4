"""Laplace noise on what a client sends: the last thing that touches a trained model before it leaves.

    δ = trained - θ_j,   ε = p / (ν·r),   r = ‖δ‖ (published) or a radius fixed beforehand,   sent = trained + noise

Within the distance r of what was trained, ε·r = p/ν is the most by which likelihoods differ.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict, UserConfig
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from cloister.client.handlers import hypotheses_of, run_config
from cloister.client.leakage import Spending, require, spending_of
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.config import PrivacyConfig
from cloister.core.errors import ConfigError, PrivacyError
from cloister.core.wire import ARRAYS, CHOSEN, CONFIG, METRICS, ROUND
from cloister.privacy.events import Laplace
from cloister.privacy.laplace import LaplaceNoise

LEAKAGE = "max-leakage"
"""The node's own limit, in its configuration."""


def sanitise(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Noise a trained model by `privacy.client = 'laplace'`; in any other run do nothing.

    A release that would pass the limit of leakage is not made, nor trained for.

    Raises:
        BudgetExhausted: the client abstains; the server sees an error reply that says so.
        PrivacyError: the model cannot be noised.
    """
    privacy = run_config(context).privacy
    if privacy.client != "laplace" or message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    hypotheses = hypotheses_of(message)
    cost = leakage_of(Layout.of(hypotheses[0]).size, privacy.client_noise_multiplier)
    spending = spending_of(context, run_config(context).task.name)
    require(spending, cost, _limit(privacy, context.node_config))
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    trained = from_record(reply.content.array_records[ARRAYS])
    chosen = reply.content.metric_records[METRICS].get(CHOSEN, 0)
    start = hypotheses[int(chosen)]  # type: ignore[arg-type]
    noise = LaplaceNoise(_seed(privacy, context, message))
    where = (str(message.metadata.run_id), int(message.content.config_records[CONFIG][ROUND]))  # type: ignore[arg-type]
    content = RecordDict({ARRAYS: to_record(released(trained, start, privacy, noise, spending, where))})
    content[METRICS] = reply.content.metric_records[METRICS]
    return Message(content, reply_to=message)


def leakage_of(parameters: int, noise_multiplier: float) -> float:
    """p/ν, what one release leaks within its neighbourhood, whatever that is; 0 without noise, which claims nothing."""
    return parameters / noise_multiplier if noise_multiplier else 0.0


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
        PrivacyError: an array is not finite.
    """
    sent = {name: np.array(array) for name, array in trained.items()}
    groups = [[name] for name in sent] if privacy.per_layer else [list(sent)]
    for names in groups if privacy.client_noise_multiplier else ():
        parameters = sum(sent[name].size for name in names)
        radius = privacy.radius or _norm([sent[name] - start[name] for name in names])
        if not radius:
            continue
        epsilon = parameters / (privacy.client_noise_multiplier * radius)
        spending.release(Laplace(epsilon, radius), *where)
        noise.add(tuple(sent[name].reshape(-1) for name in names), epsilon)
    return sent


def _norm(pieces: list[NDArray]) -> float:
    """‖δ‖₂ in double precision.

    Raises:
        PrivacyError: it is not finite.
    """
    norm = float(np.sqrt(sum(np.vdot(piece, piece) for piece in (piece.astype(np.float64) for piece in pieces))))
    if not np.isfinite(norm):
        raise PrivacyError("training has diverged: there is no finite model to release")
    return norm


def _limit(privacy: PrivacyConfig, node: UserConfig) -> float:
    """The smaller of the run's limit and the node's own; 0: neither has one."""
    own = node.get(LEAKAGE, 0.0)
    if isinstance(own, bool) or not isinstance(own, int | float) or own < 0:
        raise ConfigError(f"{LEAKAGE} = {own!r} in the node configuration must be a number of at least 0")
    return min((limit for limit in (privacy.max_leakage, float(own)) if limit), default=0.0)


def _seed(privacy: PrivacyConfig, context: Context, message: Message) -> int | None:
    """None, unless noise is to be repeated; then one for each client and round."""
    if privacy.noise_seed == -1:
        return None
    owner = context.node_config.get("partition-id", context.node_id)
    words = [privacy.noise_seed, int(owner), int(message.content.config_records[CONFIG][ROUND])]  # type: ignore[arg-type]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
