"""What the server has to say to and about its clients beside rounds: personal models, and mechanisms of theirs."""

from collections.abc import Callable, Iterator, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from cloister.config.run import PrivacyConfig
from cloister.core.arrays import Layout
from cloister.core.errors import ConfigError
from cloister.core.wire import ARRAYS, CONFIG, HYPOTHESES
from cloister.privacy.claims.claim import ClientClaim
from cloister.privacy.claims.local import gaussian_claim, laplace_claim
from cloister.privacy.dpsgd.local_steps import LocalDpSgd, LocalSteps
from cloister.privacy.mechanisms.circumstances import Circumstances
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace
from cloister.server.build import Plan

PATIENCE_SECONDS = 60.0
"""How long the end of a run waits for nodes to save their personal models."""


def personalise(grid: Grid, arrays: ArrayRecord, public: Mapping[str, int], hypotheses: int) -> None:
    """Send the final hypotheses to every connected node, for it to keep the one that suits it; nothing comes back.

    Args:
        grid: to the clients.
        arrays: of all hypotheses.
        public: what every message of the run tells.
        hypotheses: how many there are.
    """
    content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**public, HYPOTHESES: hypotheses})})
    messages = [Message(content, node, MessageType.QUERY) for node in grid.get_node_ids()]
    for message in messages:
        message.metadata.ttl = PATIENCE_SECONDS
    list(grid.send_and_receive(messages, timeout=PATIENCE_SECONDS))


def client_claim(plan: Plan, layout: Layout, rounds: int) -> ClientClaim | None:
    """What may be said about the clients' own mechanism; None without one.

    Args:
        plan: of the run.
        layout: of everything that the server sends, all hypotheses.
        rounds: in which clients were asked to train.

    Raises:
        ConfigError: nothing is known about this mechanism.
    """
    mechanism = plan.config.privacy.client
    if mechanism == "none":
        return None
    if mechanism not in CLAIMS:
        raise ConfigError(f"privacy.client = {mechanism!r} has no claim; known: {', '.join(CLAIMS)}")
    return CLAIMS[mechanism](plan, layout, rounds).without_guarantee(_beside_the_noise(plan))


def _beside_the_noise(plan: Plan) -> Iterator[str]:
    """What clients let leave in this run that their own noise does not cover."""
    if plan.config.evaluates_on_clients and not plan.config.evaluation.held_out_clients:
        yield "scores of models on the clients' own examples leave without noise"
    if plan.held_out is not None and plan.held_out.newcomers:
        yield (
            "nodes were connected after roles had been dealt out: one that has no lasting memory of its data may have "
            "come back under a new id, and both trained and sent scores without noise"
        )


def _circumstances(plan: Plan) -> Circumstances:
    """What the run does beside the clients' mechanism that its guarantee depends on."""
    privacy = plan.config.privacy
    private = privacy.choice == "private"
    return Circumstances(privacy.noise_seed != -1, max(1, plan.hypotheses), private, privacy.choice_epsilon)


def _laplace_claim(plan: Plan, layout: Layout, rounds: int) -> ClientClaim:
    """A client noises the one hypothesis that it sends: p is the size of that."""
    privacy, parameters = plan.config.privacy, layout.size // max(1, plan.hypotheses)
    mechanism: LocalLaplace | PublishedLaplace = PublishedLaplace(privacy.client_noise_multiplier, privacy.per_layer)
    if privacy.radius:
        mechanism = LocalLaplace(privacy.radius, privacy.client_noise_multiplier, privacy.per_layer)
    return laplace_claim(mechanism, parameters, rounds, _circumstances(plan), privacy.max_leakage)


def _gaussian_claim(plan: Plan, _: Layout, rounds: int) -> ClientClaim:
    privacy = plan.config.privacy
    mechanism = LocalGaussian(privacy.client_clipping_norm, privacy.client_noise_multiplier)
    return gaussian_claim(mechanism, rounds, privacy.target_delta, _circumstances(plan))


def _dp_sgd_claim(plan: Plan, _: Layout, rounds: int) -> ClientClaim:
    """For clients of several sizes: how many examples, or groups of them, a client has, the server does not know.

    Just above one batch an epoch has two steps that hardly sample. With little noise some sizes of two or three batches
    cost a tenth more than that; what a client has really spent, its own ledger knows.
    """
    from cloister.privacy.claims.end_to_end import dp_sgd_claim

    config, recipe = plan.config, plan.task.recipe
    batch_size = recipe.batch_size if config.client.batch_size == "auto" else config.client.batch_size
    epochs = recipe.local_epochs if config.client.local_epochs == "auto" else config.client.local_epochs
    mechanism = _dp_sgd_of(config.privacy, bool(config.task.group))
    sizes = [
        LocalSteps(examples, batch_size, epochs, mechanism.sampling)
        for examples in (batch_size, batch_size + 1, 10 * batch_size, 100 * batch_size)
    ]
    return dp_sgd_claim(mechanism, sizes, rounds, config.privacy.target_delta, _circumstances(plan))


def _dp_sgd_of(privacy: PrivacyConfig, grouped: bool) -> LocalDpSgd:
    return LocalDpSgd(
        privacy.client_noise_multiplier,
        privacy.client_clipping_norm,
        privacy.clipping_decay,
        privacy.least_clipping_norm,
        privacy.batch_sampling,
        privacy.group_cap if grouped else 0,
    )


CLAIMS: Mapping[str, Callable[[Plan, Layout, int], ClientClaim]] = {
    "dp-sgd": _dp_sgd_claim,
    "gaussian": _gaussian_claim,
    "laplace": _laplace_claim,
}
"""By `privacy.client`: what may be said after so many rounds."""
