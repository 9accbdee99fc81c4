"""What the server has to say to and about its clients beside rounds: personal models, and mechanisms of theirs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from cloister.config.run import RunConfig
from cloister.core.arrays import Layout
from cloister.core.errors import ConfigError
from cloister.core.wire import ARRAYS, CONFIG, HYPOTHESES
from cloister.privacy.claims.claim import CLIENT_BUDGET, ClientClaim
from cloister.privacy.claims.local import gaussian_claim, laplace_claim
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace
from cloister.server.build import Plan

SAVING_SECONDS = 60.0
"""How long the end of a run waits for nodes to save their personal models."""


def personalise(grid: Grid, arrays: ArrayRecord, public: Mapping[str, str | int], hypotheses: int) -> None:
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
        message.metadata.ttl = SAVING_SECONDS
    for _ in grid.send_and_receive(messages, timeout=SAVING_SECONDS):
        pass  # what comes back says nothing, and is not kept


@runtime_checkable
class Dealing(Protocol):
    """A grid that knows how much data its nodes have, as it is a part of a benchmark that is dealt out here."""

    def units(self, config: RunConfig, seed: int) -> list[int]:
        """How many examples, or groups of them, each node has; none where any has data of its own."""


def sizes_known(plan: Plan, grid: Grid) -> tuple[LocalSteps, ...]:
    """The private steps in a round of each client, where this process deals out what they have; none elsewhere.

    Args:
        plan: of the run.
        grid: to the clients.
    """
    if not plan.config.privacy.client.clips_gradients or not isinstance(grid, Dealing):
        return ()
    return tuple(_steps(plan, units) for units in grid.units(plan.config, plan.seed))


def _steps(plan: Plan, units: int) -> LocalSteps:
    sampling = plan.config.privacy.dp_sgd.batch_sampling
    return LocalSteps(units, plan.recipe.batch_size, plan.recipe.local_epochs, sampling)


def client_claim(
    plan: Plan, layout: Layout, rounds: int, sizes: Sequence[LocalSteps] | None = None
) -> ClientClaim | None:
    """What may be said about the clients' own mechanism; None without one.

    Args:
        plan: of the run.
        layout: of everything that the server sends, all hypotheses.
        rounds: in which clients were asked to train.
        sizes: the private steps in a round of the clients, with `dp-sgd`; None, or none: what they have is not known,
            and several sizes are taken as examples.

    Raises:
        ConfigError: nothing is known about this mechanism.
    """
    privacy = plan.config.privacy
    mechanism, circumstances = privacy.client.noise_on_update, privacy.circumstances
    claim: ClientClaim
    if not privacy.client.is_on:
        return None
    if privacy.client.clips_gradients:
        claim = _dp_sgd_claim(plan, rounds, sizes)
    elif isinstance(mechanism, LocalGaussian):
        claim = gaussian_claim(mechanism, rounds, privacy.target_delta, circumstances)
    elif isinstance(mechanism, LocalLaplace | PublishedLaplace):
        # A client noises the one hypothesis that it sends: p is the size of that.
        parameters = layout.size // max(1, plan.hypotheses)
        # A node that keeps no ledger takes a resumed run for a new one, and lets the limit out once more.
        counts = 1 + plan.resumes
        claim = laplace_claim(mechanism, parameters, rounds, circumstances, privacy.client.max_leakage, counts)
    else:
        raise ConfigError(f"privacy.client = {privacy.client.name!r} has no claim")
    limit = privacy.client.max_epsilon
    if limit:
        claim = replace(claim, parameters={**claim.parameters, CLIENT_BUDGET: limit})
    return claim.without_guarantee(_beside_the_noise(plan))


def _beside_the_noise(plan: Plan) -> Iterator[str]:
    """What clients let leave in this run that their own noise does not cover."""
    if plan.config.evaluates_on_clients and not plan.config.evaluation.held_out_clients:
        yield "scores of models on the clients' own examples leave without noise"
    if plan.held_out is not None and plan.held_out.newcomers:
        yield (
            "nodes were connected after roles had been dealt out: one that has no lasting memory of its data may have "
            "come back under a new id, and both trained and sent scores without noise"
        )


def _dp_sgd_claim(plan: Plan, rounds: int, known: Sequence[LocalSteps] | None) -> ClientClaim:
    """For clients of several sizes: how many examples, or groups of them, a client has, a server does not know.

    Where it does, figures are given for the sizes that stand for all; where it does not, for examples of sizes. Just
    above one batch an epoch has two steps that hardly sample. With little noise some sizes of two or three batches cost
    a tenth more than that; what a client has really spent, its own ledger knows.
    """
    from cloister.privacy.claims.end_to_end import dp_sgd_claim, standing_for_all

    privacy, batch = plan.config.privacy, plan.recipe.batch_size
    mechanism = privacy.dp_sgd.mechanism(grouped=bool(plan.config.task.group))
    if known:
        sizes = standing_for_all(known, mechanism, rounds, privacy.target_delta)
    else:
        sizes = tuple(_steps(plan, units) for units in (batch, batch + 1, 10 * batch, 100 * batch))
    claim = dp_sgd_claim(mechanism, sizes, rounds, privacy.target_delta, privacy.circumstances)
    return replace(claim, known=bool(known))
