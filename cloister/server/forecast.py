"""Forecast of a run's server-side privacy, by recording its rounds in a ledger in memory.

    prepare ──▶ forecast: begin, require, record, as a run does ──▶ statements, remaining budget

Events, budget, ledger, claim and the order of sums are those of the run itself.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.ledger import DraftLedger, Ledger
from cloister.privacy.claims.claim import Statement
from cloister.privacy.claims.server import statement
from cloister.privacy.dpsgd.local_steps import Holders, LocalSteps
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.gaussian import GaussianMechanism
from cloister.privacy.mechanisms.mechanism import Contributions
from cloister.privacy.mechanisms.metric import CONSTANT
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.secure_aggregation.messages import Delivery
from cloister.server.build import Plan, named_strategy
from cloister.server.client_claims import client_claim
from cloister.server.ledger_location import kept_budget, leaves_unguaranteed, needs_lasting_ledger
from cloister.server.prepare import Prepared
from cloister.server.private_strategy import PrivateStrategy
from cloister.server.run import AnyClaim, as_shown, render_sampling
from cloister.server.secure_steps import SecureSteps
from cloister.tasks.making import frozen_digest_field
from cloister.utils.arrays import from_record
from cloister.utils.cohort import Cohort
from cloister.utils.errors import BudgetExhausted
from cloister.utils.wire import SECURE_MESSAGE, SEED

PLANNED = "(planned)"
"""Run name of planned releases; no real run can have it."""


@dataclass(frozen=True)
class Forecast:
    """Forecast of a run on the server.

    Attributes:
        prepared: the run.
        statements: the privacy statement after each of the requested rounds.
        last: the statement after the last round, with the clients' claim.
        rounds: number of rounds that would run; below the configured number if a budget ends the run.
        stopped: the reason for an early end; empty if the run would not end early.
        before: share of the budget that is spent before the run; None: there is no budget.
        after: share that is spent after it.
        more: number of further such rounds that would fit; None: unlimited.
        closing: whether the run prevents every later budget on the same data.
        kept: the budget on this data before the run, in words; empty: none.
    """

    prepared: Prepared
    statements: Mapping[int, Statement]
    last: Statement
    rounds: int
    stopped: str
    before: float | None
    after: float | None
    more: int | None
    closing: bool
    kept: str


def draft(plan: Plan, grid: Grid) -> PrivacyBudget[Ledger]:
    """Replace the ledger of a run's budget by one in memory; return the budget.

    Args:
        plan: of the run; its budget is changed.
        grid: to the clients; it decides whether the draft starts from the shared ledger.
    """
    path = plan.budget.ledger.path if needs_lasting_ledger(plan, grid) else Path(os.devnull)
    plan.budget.ledger = DraftLedger(path)
    return plan.budget


def forecast(
    prepared: Prepared,
    shown: Sequence[int],
    sizes: Sequence[LocalSteps] = (),
    shared: Collection[Holders] | None = None,
    grid: Grid | None = None,
) -> Forecast:
    """Record the planned releases until the rounds or the budget end.

    Args:
        prepared: the run; its budget must be a draft.
        shown: numbers of the rounds after which to make a statement.
        sizes: the private steps of each client in a round, where the run will have them.
        shared: as in `client_claim`.
        grid: to the simulated clients of the run, which shows its premises; None: the run is of sites.
    """
    plan, layout = prepared.plan, prepared.layout
    budget, statements, stopped, number = plan.budget, dict[int, Statement](), "", 0
    before = budget.share() if budget.max_epsilon else None
    kept = kept_budget(plan)
    budget.begin(PLANNED)
    for reason in plan.unprotected_releases:
        budget.record_unprotected(reason)
    for number in range(1, plan.config.num_rounds + 1):
        try:
            budget.require(plan.strategy.events(layout))
        except BudgetExhausted as error:
            stopped, number = f"before round {number}: {error}", number - 1
            break
        with plan.strategy.recorded(layout, number):
            pass
        if number in shown:
            statements[number] = _statement(prepared, number, grid)
    clients = client_claim(plan, layout, number, sizes, shared)
    last = replace(_statement(prepared, number, grid), clients=None if clients is None else shown_by(clients, grid))
    after = budget.share() if budget.max_epsilon else None
    more = budget.fits(plan.strategy.events(layout))
    closing = last.ledger.lasting and leaves_unguaranteed(plan)
    return Forecast(prepared, statements, last, number, stopped, before, after, more, closing, kept)


def _statement(prepared: Prepared, rounds: int, grid: Grid | None) -> Statement:
    plan = prepared.plan
    lasting = plan.budget.ledger.path != Path(os.devnull)
    said = statement(shown_by(plan.claim, grid), plan.budget, rounds, render_sampling(plan), lasting=lasting)
    return replace(said, simulated=grid is not None)


def shown_by(claim: AnyClaim, grid: Grid | None) -> AnyClaim:
    """Return a claim with the premises that the grid of a simulated run shows, as the run will; None: nothing is shown.

    Args:
        claim: of the server's or the clients' mechanism.
        grid: as in `forecast`.
    """
    return claim if grid is None else as_shown(claim, grid, resumed=False)


def first_messages(prepared: Prepared, grid: Grid) -> list[Message]:
    """Return the first round's messages to every training node, unsent.

    Args:
        prepared: the run.
        grid: with the nodes.

    Raises:
        BudgetExhausted: the budget does not cover the first round.
    """
    plan, strategy = prepared.plan, copy(prepared.plan.strategy)
    everybody = plan.config.strategy.model_copy(update={"sampling": "fixed", "fraction_train": 1.0})
    config = plan.config.model_copy(update={"strategy": everybody})
    strategy.inner = named_strategy(config, held_out=plan.held_out)
    public = ConfigRecord({SEED: plan.seed, **frozen_digest_field(prepared.model)})
    if plan.config.secure_aggregation.enabled:
        public[SECURE_MESSAGE] = Delivery((), {}).encode()  # a real one carries shares of peers within a round
    return list(strategy.configure_train(1, prepared.initial, public, grid))


@dataclass(frozen=True)
class NoiseOnRelease:
    """Noise that the server adds to its releases.

    Attributes:
        multiplier: z, calibrated if configured so; None: the mechanism has none.
        std: smallest and largest standard deviation on one parameter of the released model in a round; 0 or ∞ without a
            limit.
    """

    multiplier: float | None
    std: tuple[float, float]


def noise_on_release(prepared: Prepared, nodes: int) -> NoiseOnRelease | None:
    """Return the noise of the first round on zero updates; None without noise.

    Args:
        prepared: the run.
        nodes: number of connected nodes.
    """
    strategy = prepared.plan.strategy
    if not isinstance(strategy, PrivateStrategy) or isinstance(strategy, SecureSteps):
        return None
    mechanism, clients = strategy.mechanism, prepared.plan.cohort(nodes)
    if isinstance(mechanism, DistributedMean):
        std = mechanism.multiplier * mechanism.clipping_norm / max(1, round(clients))
        low, high = mechanism.scale.factors(mechanism.clip.bound, prepared.layout)
        return NoiseOnRelease(mechanism.multiplier, (std * low, std * high))
    low = high = 1.0
    if isinstance(mechanism, GaussianMechanism):
        # Zero updates have distance 0. The result is the noise at both limits of the distance instead.
        low, high = mechanism.scale.factors(mechanism.clip.bound, prepared.layout)
        mechanism = replace(mechanism, scale=CONSTANT)
    asked, expected = max(1, round(clients)), clients + len(strategy.canaries) / 2
    sent = prepared.layout.rows(from_record(prepared.initial))
    cohort = Cohort(prepared.layout, sent, (sent,) * asked, np.zeros(asked), np.ones(asked))
    released = mechanism.release(Contributions(cohort, (1.0,) * asked, asked, expected, GaussianNoise(), 1))
    if not (std := released.noise_std):
        return NoiseOnRelease(released.noise_multiplier, (0.0, 0.0))
    return NoiseOnRelease(released.noise_multiplier, (std * low, std * high))
