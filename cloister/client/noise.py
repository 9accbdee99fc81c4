"""Noise on a client's update, the last change of a trained model before it leaves."""

import hashlib
import logging
from logging import WARNING

from cloister.client.ledgers import CHOICE, InMemoryLeakage, folder_unnamed, keeps_ledger, ledger_of
from cloister.client.node import Node, stricter
from cloister.client.request import KeepRequest, Reply, Request, TrainRequest
from cloister.privacy.accounting.budget import PrivacyBudget, Store
from cloister.privacy.accounting.events import Event, Laplace, Pure, Unaccounted
from cloister.privacy.mechanisms.local import fits, no_noise
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.selection import EXACT, SEEDED
from cloister.utils.arrays import Layout
from cloister.utils.errors import BudgetExhausted, PrivacyError
from cloister.utils.state import Coordinates, is_state

logger = logging.getLogger("cloister.client")


def limit_leakage(request: Request, node: Node) -> None:
    """Abstain if the limit of leakage does not cover a reply.

    No budget is charged in that case. A node with such a limit refuses every request whose reply would carry no Laplace
    noise.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        BudgetExhausted: the client abstains; the server receives an error reply that states it.
        PrivacyError: the run's radius is below the node's minimum.
    """
    if isinstance(request, KeepRequest):
        return  # no data leaves
    if isinstance(request, TrainRequest) and request.config.privacy.client.counts_leakage:
        radius, minimum = request.config.privacy.client.bound, node.config.min_radius
        # A server could shrink the noise with a small radius, but not the charge.
        if radius and node.config.max_leakage and not 0 < minimum <= radius:
            raise PrivacyError(
                f"privacy.radius = {radius:g} is not of at least the min-radius of this node, which has a limit "
                "(max-leakage): a limit within a radius of any size bounds nothing"
            )
        with folder_unnamed(node.config):
            leakage_budget(request, node).require(leaked(request))
    elif node.config.max_leakage:
        raise BudgetExhausted(
            "this node has a limit (max-leakage), and this would leave without the noise that it counts"
        )


def add_local_noise(reply: Reply, request: Request, node: Node) -> Reply:
    """Return the model with the noise of `privacy.client`, and no other part; other replies as they are.

    The noise is secret, or a seeded stream for each client and round.
    """
    mechanism, seed = request.config.privacy.client.noise_on_update, request.config.privacy.noise_seed
    if mechanism is None or not isinstance(request, TrainRequest):
        return reply
    if seed == -1:
        noise = GaussianNoise()
    else:
        digest = hashlib.sha256(f"client sends {seed} {node.owner} {request.round}".encode()).digest()
        noise = GaussianNoise(2**64 + int.from_bytes(digest[:8]))

    def note(reason: str) -> None:
        # Log on the node only: for the server the reply is noise like any other.
        logger.log(WARNING, "%s; what is sent is noise on the model that came", reason)

    trained, start = reply.arrays or {}, request.models[reply.chosen]
    if not any(map(is_state, start)):
        return Reply(mechanism.release(trained, start, noise, note))
    layout = Layout.of(start)
    coordinates = Coordinates.of(layout, layout.rows(start), mechanism.ball)
    if fits(trained, start):  # others count as no update
        trained = layout.named(coordinates.bounded(layout.rows(trained)))
    released = mechanism.release(trained, layout.named(coordinates.origin), noise, note)
    return Reply(layout.named(coordinates.decoded(layout.rows(released))))


def count_leakage(request: Request, node: Node) -> None:
    """Charge a Laplace release's leakage within its neighbourhood in advance.

    A release beyond the limit is not computed, and its model is not trained.

    Raises:
        BudgetExhausted: a concurrent reply has used the remaining limit of leakage; nothing was charged.
    """
    client = request.config.privacy.client
    if not isinstance(request, TrainRequest) or client.noise_on_update is None or not client.counts_leakage:
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
    if keeps_ledger(node.config):
        ledger = ledger_of(node.config, request.config.task.name)
        return PrivacyBudget[Store](ledger, request.run, "neighbourhood", max_epsilon=limit)
    tally = InMemoryLeakage(node.state)
    tally.catch_up("neighbourhood", leaked(request))
    return PrivacyBudget[Store](tally, request.run, "neighbourhood", max_epsilon=limit)


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
        release = Unaccounted(no_noise("laplace") if not noise else SEEDED)
    else:
        release = Laplace(parameters / noise / radius, radius)
    if privacy.chooses_exactly:
        return release, Unaccounted(EXACT)
    return (release, Pure(privacy.choice_epsilon)) if privacy.chooses_privately else (release,)
