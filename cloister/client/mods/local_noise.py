"""Noise on a client's update, the last change of a trained model before it leaves."""

import hashlib
import logging
from logging import WARNING

from cloister.client.ledgers import folder_unnamed, keeps_ledger, ledger_of
from cloister.client.mods.enforce import Handler
from cloister.client.node import Node, NodeConfig, stricter
from cloister.client.request import KeepRequest, Reply, Request, TrainRequest
from cloister.client.tally import CHOICE, LeakageTally
from cloister.core.arrays import Layout
from cloister.core.errors import BudgetExhausted, PrivacyError
from cloister.privacy.accounting.budget import PrivacyBudget, Store
from cloister.privacy.accounting.events import Event, Laplace, Pure, Unaccounted
from cloister.privacy.mechanisms.circumstances import EXACT, SEEDED
from cloister.privacy.mechanisms.local import NO_NOISE
from cloister.privacy.mechanisms.noise import GaussianNoise

logger = logging.getLogger("cloister.client")


def limit_leakage(request: Request, node: Node, call_next: Handler) -> Reply:
    """Abstain if the limit of leakage does not cover a reply.

    No budget is charged in that case. A node with such a limit refuses every request whose reply would carry no Laplace
    noise.

    Args:
        request: of the server.
        node: that replies.
        call_next: computes the reply.

    Raises:
        BudgetExhausted: the client abstains; the server receives an error reply that states it.
        PrivacyError: the run's radius is below the node's minimum.
    """
    if isinstance(request, KeepRequest):
        return call_next(request, node)  # no data leaves
    if isinstance(request, TrainRequest) and request.config.privacy.client.counts_leakage:
        _refuse_free_radius(request.config.privacy.client.bound, node.config)
        with folder_unnamed(node.config):
            leakage_budget(request, node).require(leaked(request))
    elif node.config.max_leakage:
        raise BudgetExhausted(
            "this node has a limit (max-leakage), and this would leave without the noise that it counts"
        )
    return call_next(request, node)


def add_local_noise(request: Request, node: Node, call_next: Handler) -> Reply:
    """Add the noise of `privacy.client` to a model; drop all other parts.

    A release beyond the limit of leakage is not computed, and its model is not trained.

    Args:
        request: of the server.
        node: that replies.
        call_next: computes the reply.

    Raises:
        BudgetExhausted: a concurrent reply has used the remaining limit of leakage.
    """
    mechanism = request.config.privacy.client.noise_on_update
    if mechanism is None or not isinstance(request, TrainRequest):
        return call_next(request, node)
    _count_leakage(request, node)
    reply = call_next(request, node)
    sent = mechanism.release(reply.arrays or {}, request.models[reply.chosen], _noise(request, node), _note)
    return Reply(sent)


def _note(reason: str) -> None:
    """Log the reason on the node only.

    For the server the reply is noise like any other.
    """
    logger.log(WARNING, "%s; what is sent is noise on the model that came", reason)


def _count_leakage(request: TrainRequest, node: Node) -> None:
    """Charge a Laplace release's leakage within its neighbourhood in advance.

    Raises:
        BudgetExhausted: it exceeds the limit; nothing was charged.
    """
    if not request.config.privacy.client.counts_leakage:
        return
    with folder_unnamed(node.config):
        # Releases that are computed but not sent count too.
        for event, mechanism in zip(leaked(request), ("laplace", CHOICE), strict=False):
            leakage_budget(request, node).spend(event, request.round, mechanism)


def leakage_budget(request: TrainRequest, node: Node) -> PrivacyBudget[Store]:
    """Return the budget for this client's leakage, by the stricter limit.

    Args:
        request: of a run that counts leakage.
        node: that replies.
    """
    limit = stricter(request.config.privacy.client.max_leakage, node.config.max_leakage)
    store = _store(request, node)
    if isinstance(store, LeakageTally):
        store.catch_up("neighbourhood", leaked(request))
    return PrivacyBudget(store, request.run, "neighbourhood", max_epsilon=limit)


def _store(request: TrainRequest, node: Node) -> Store:
    """Return the store of leakage: the node's ledger, or its state."""
    kept = keeps_ledger(node.config)
    return ledger_of(node.config, request.config.task.name) if kept else LeakageTally(node.state)


def leaked(request: TrainRequest) -> tuple[Event, ...]:
    """Return the leakage of a reply: p/ν within the radius, and a choice's.

    With a radius of 0, the published radius is the update's own length, counted as 1. A private choice leaks its ε; the
    leakage of an exact one has no limit.

    Args:
        request: of a run that counts leakage.
    """
    privacy, parameters = request.config.privacy, Layout.of(request.models[0]).size
    radius, noise = privacy.client.bound or 1.0, privacy.client.noise_multiplier
    release: Event
    if privacy.noise_seed != -1 or not noise:
        release = Unaccounted(NO_NOISE if not noise else SEEDED)
    else:
        release = Laplace(parameters / noise / radius, radius)
    if privacy.chooses_exactly:
        return release, Unaccounted(EXACT)
    return (release, Pure(privacy.choice_epsilon)) if privacy.chooses_privately else (release,)


def _refuse_free_radius(radius: float, node: NodeConfig) -> None:
    """Refuse a radius below the node's minimum.

    A server could shrink the noise with it, but not the charge.

    Raises:
        PrivacyError: this node has a limit of its own, and the run's radius is below its `min-radius`.
    """
    if radius and node.max_leakage and not 0 < node.min_radius <= radius:
        raise PrivacyError(
            f"privacy.radius = {radius:g} is not of at least the min-radius of this node, which has a limit "
            "(max-leakage): a limit within a radius of any size bounds nothing"
        )


def _noise(request: TrainRequest, node: Node) -> GaussianNoise:
    """Return secret noise, or a seeded stream for each client and round."""
    seed = request.config.privacy.noise_seed
    if seed == -1:
        return GaussianNoise()
    digest = hashlib.sha256(f"client sends {seed} {node.owner} {request.round}".encode()).digest()
    return GaussianNoise(2**64 + int.from_bytes(digest[:8]))
