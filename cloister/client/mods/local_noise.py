"""Noise on what a client sends: the last thing that touches a trained model before it leaves."""

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
    """Abstain where the limit of leakage leaves no room for a reply, before a budget is charged for it.

    A node with such a limit takes part in nothing that leaves it without Laplace noise.

    Args:
        request: of the server.
        node: that answers.
        call_next: makes the reply.

    Raises:
        BudgetExhausted: the client abstains; the server sees an error reply that says so.
        PrivacyError: the run's radius is below what the node takes part under.
    """
    if isinstance(request, KeepRequest):
        return call_next(request, node)  # nothing leaves
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
    """Noise a trained model by `privacy.client`, and let nothing else of the reply through.

    A release that would pass the limit of leakage is not made, nor trained for.

    Args:
        request: of the server.
        node: that answers.
        call_next: makes the reply.

    Raises:
        BudgetExhausted: another reply has taken what was left of the limit of leakage.
    """
    mechanism = request.config.privacy.client.noise_on_update
    if mechanism is None or not isinstance(request, TrainRequest):
        return call_next(request, node)
    _count_leakage(request, node)
    reply = call_next(request, node)
    sent = mechanism.release(reply.arrays or {}, request.models[reply.chosen], _noise(request, node), _note)
    return Reply(sent)


def _note(reason: str) -> None:
    """For the node's log alone: the server sees noise like any other."""
    logger.log(WARNING, "%s; what is sent is noise on the model that came", reason)


def _count_leakage(request: TrainRequest, node: Node) -> None:
    """Count what a Laplace release leaks within its neighbourhood, before it is made.

    Raises:
        BudgetExhausted: it would pass the limit; nothing was counted.
    """
    if not request.config.privacy.client.counts_leakage:
        return
    with folder_unnamed(node.config):
        # Nothing tells a release apart that was made and not handed on: both count.
        for event, mechanism in zip(leaked(request), ("laplace", CHOICE), strict=False):
            leakage_budget(request, node).spend(event, request.round, mechanism)


def leakage_budget(request: TrainRequest, node: Node) -> PrivacyBudget[Store]:
    """What all releases of this client may leak, by the run's limit and its own, the stricter of the two.

    Args:
        request: of a run that counts leakage.
        node: that counts it.
    """
    limit = stricter(request.config.privacy.client.max_leakage, node.config.max_leakage)
    store = _store(request, node)
    if isinstance(store, LeakageTally):
        store.catch_up("neighbourhood", leaked(request))
    return PrivacyBudget(store, request.run, "neighbourhood", max_epsilon=limit)


def _store(request: TrainRequest, node: Node) -> Store:
    """Where leakage is counted: on disk where the node keeps a ledger, else in its state."""
    kept = keeps_ledger(node.config)
    return ledger_of(node.config, request.config.task.name) if kept else LeakageTally(node.state)


def leaked(request: TrainRequest) -> tuple[Event, ...]:
    """Return what a reply leaks: p/ν within the radius, and what a choice among hypotheses does.

    The published radius is the update's own length, counted as 1. A private choice leaks its ε, an exact one without
    limit.

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
    """Refuse a radius that the server may choose as small as it likes: noise is in proportion, and the leakage is not.

    Raises:
        PrivacyError: this node has a limit of its own, and the run's radius is not of at least its `min-radius`.
    """
    if radius and node.max_leakage and not 0 < node.min_radius <= radius:
        raise PrivacyError(
            f"privacy.radius = {radius:g} is not of at least the min-radius of this node, which has a limit "
            "(max-leakage): a limit within a radius of any size bounds nothing"
        )


def _noise(request: TrainRequest, node: Node) -> GaussianNoise:
    """The operating system's entropy, unless noise is to be repeated; then a stream for each client and round."""
    seed = request.config.privacy.noise_seed
    if seed == -1:
        return GaussianNoise()
    digest = hashlib.sha256(f"client sends {seed} {node.owner} {request.round}".encode()).digest()
    return GaussianNoise(2**64 + int.from_bytes(digest[:8]))
