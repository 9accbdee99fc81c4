"""Noise on what a client sends: the last thing that touches a trained model before it leaves."""

import hashlib
import logging
from logging import WARNING

from flwr.app import Context, UserConfig

from cloister.client.leakage import leakage_budget, limit_of, own_limit
from cloister.client.ledgers import MAX_LEAKAGE, folder_unnamed
from cloister.client.mods.enforce import Handler
from cloister.client.request import KeepRequest, Reply, Request, TrainRequest
from cloister.core.arrays import Layout
from cloister.core.errors import BudgetExhausted, ConfigError, PrivacyError
from cloister.privacy.accounting.events import Laplace, Unaccounted
from cloister.privacy.mechanisms.noise import GaussianNoise

MIN_RADIUS = "min-radius"
"""The smallest radius that a node with a limit of leakage takes part under, in its configuration."""
logger = logging.getLogger("cloister.client")


def add_local_noise(request: Request, context: Context, call_next: Handler) -> Reply:
    """Noise a trained model by `privacy.client`, and let nothing else of the reply through.

    A release that would pass the limit of leakage is not made, nor trained for. A node with such a limit takes part in
    nothing that leaves it without Laplace noise.

    Args:
        request: of the server.
        context: of the node.
        call_next: makes the reply.

    Raises:
        BudgetExhausted: the client abstains; the server sees an error reply that says so.
        PrivacyError: the run's radius is below what the node takes part under.
    """
    privacy = request.config.privacy
    if isinstance(request, KeepRequest):
        return call_next(request, context)
    counted = privacy.client.counts_leakage and isinstance(request, TrainRequest)
    if own_limit(context.node_config) and not counted:
        raise BudgetExhausted(
            f"this node has a limit ({MAX_LEAKAGE}), and this would leave without the noise that it counts"
        )
    mechanism = privacy.client.noise_on_update
    if mechanism is None or not isinstance(request, TrainRequest):
        return call_next(request, context)
    _count_leakage(request, context)
    reply = call_next(request, context)
    sent = mechanism.release(reply.arrays or {}, request.models[reply.chosen], _noise(request, context), _note)
    return Reply(sent)


def _note(reason: str) -> None:
    """For the node's log alone: the server sees noise like any other."""
    logger.log(WARNING, "%s; what is sent is noise on the model that came", reason)


def _count_leakage(request: TrainRequest, context: Context) -> None:
    """Count what a Laplace release leaks within its neighbourhood, before it is made.

    Raises:
        BudgetExhausted: it would pass the limit; nothing was counted.
        PrivacyError: the run chose its radius below what this node takes part under.
    """
    privacy, node = request.config.privacy, context.node_config
    if not privacy.client.counts_leakage:
        return
    _refuse_free_radius(privacy.client.bound, node)
    with folder_unnamed(node):
        budget = leakage_budget(context, request.config.task.name, request.run, limit_of(privacy, node))
        # Nothing tells a release apart that was made and not handed on: both count.
        budget.spend(leaked(request), request.round, "laplace")


def leaked(request: TrainRequest) -> Laplace | Unaccounted:
    """What one release leaks: p/ν within the radius; the published radius is the update's own length, counted as 1."""
    privacy, parameters = request.config.privacy, Layout.of(request.models[0]).size
    if privacy.noise_seed != -1:
        return Unaccounted("the noise is seeded: whoever knows privacy.noise-seed can remove it")
    if not privacy.client.noise_multiplier:
        return Unaccounted("privacy.client-noise-multiplier is 0: there is no noise")
    radius = privacy.client.bound or 1.0
    return Laplace(parameters / privacy.client.noise_multiplier / radius, radius)


def _refuse_free_radius(radius: float, node: UserConfig) -> None:
    """Refuse a radius that the server may choose as small as it likes: noise is in proportion, and the leakage is not.

    Raises:
        PrivacyError: this node has a limit of its own, and the run's radius is not of at least its `min-radius`.
    """
    minimum = node.get(MIN_RADIUS, 0.0)
    if isinstance(minimum, bool) or not isinstance(minimum, int | float) or minimum < 0:
        raise ConfigError(f"{MIN_RADIUS} = {minimum!r} in the node configuration must be a number of at least 0")
    if radius and own_limit(node) and not 0 < minimum <= radius:
        raise PrivacyError(
            f"privacy.radius = {radius:g} is not of at least the {MIN_RADIUS} of this node, which has a limit "
            f"({MAX_LEAKAGE}): a limit within a radius of any size bounds nothing"
        )


def _noise(request: TrainRequest, context: Context) -> GaussianNoise:
    """The operating system's entropy, unless noise is to be repeated; then a stream for each client and round."""
    seed = request.config.privacy.noise_seed
    if seed == -1:
        return GaussianNoise()
    owner = context.node_config.get("partition-id", context.node_id)
    digest = hashlib.sha256(f"client sends {seed} {owner} {request.round}".encode()).digest()
    return GaussianNoise(2**64 + int.from_bytes(digest[:8]))
