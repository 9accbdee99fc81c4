"""What a run would come to on the server, if all its rounds ran: entered round by round in a ledger that is in memory.

    prepare ──▶ forecast: begin, require, record, as a run does ──▶ statements, what a budget has left

There is no second accounting: events, budget, ledger and claim are the run's own, and so are the sums, in their order.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from cloister.aggregation import PrivateStrategy
from cloister.core.arrays import from_record
from cloister.core.cohort import Cohort
from cloister.core.errors import BudgetExhausted
from cloister.core.wire import SECURE_MESSAGE, SEED
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.ledger import DraftLedger, Ledger
from cloister.privacy.claims.claim import Statement
from cloister.privacy.claims.server import statement
from cloister.privacy.dpsgd.local_steps import Holders, LocalSteps
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.gaussian import GaussianMechanism
from cloister.privacy.mechanisms.mechanism import Contributions
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.secure_aggregation.messages import Delivery
from cloister.server.build import Plan
from cloister.server.clients import client_claim
from cloister.server.lasting import kept_budget, leaves_unguaranteed, needs_lasting_ledger
from cloister.server.prepare import Prepared
from cloister.server.run import render_sampling
from cloister.server.strategies import named_strategy
from cloister.tasks.frozen import told_of

PLANNED = "(planned)"
"""The name that planned releases are entered under: no run can have it."""


@dataclass(frozen=True)
class Forecast:
    """What would be said of a run on the server.

    Attributes:
        prepared: the run.
        statements: what could be said of the server after some of its rounds.
        last: what could be said after the last one, of the clients too.
        rounds: how many would run: fewer than were asked for where a budget ends the run.
        stopped: why it would end early; empty if it would not.
        before: share of the budget that is spent before the run; None: there is no budget.
        after: share that is spent after it.
        more: how many more such rounds would fit afterwards; None: as many as you like.
        closing: whether no later run on the same data could keep a budget.
        kept: the budget that is kept on this data before the run, in words; empty: none.
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
    """The budget of a run, from here on over a ledger that is in memory: nothing that is spent in it is written.

    Args:
        plan: of the run; its budget is changed.
        grid: to the clients: whether they have data that is to be remembered decides which ledger counts.
    """
    path = plan.budget.ledger.path if needs_lasting_ledger(plan, grid) else Path(os.devnull)
    plan.budget.ledger = DraftLedger(path)
    return plan.budget


def forecast(
    prepared: Prepared,
    shown: Sequence[int],
    sizes: Sequence[LocalSteps] = (),
    shared: Collection[Holders] | None = None,
) -> Forecast:
    """Enter what a run releases, round by round, until its rounds or its budget are at an end.

    Args:
        prepared: the run; its budget must be a draft.
        shown: after which rounds a statement is wanted.
        sizes: the private steps in a round of each client, where the run will know them.
        shared: as in `client_claim`.
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
            statements[number] = _statement(prepared, number)
    last = replace(_statement(prepared, number), clients=client_claim(plan, layout, number, sizes, shared))
    after = budget.share() if budget.max_epsilon else None
    more = budget.fits(plan.strategy.events(layout))
    closing = last.ledger.lasting and leaves_unguaranteed(plan)
    return Forecast(prepared, statements, last, number, stopped, before, after, more, closing, kept)


def _statement(prepared: Prepared, rounds: int) -> Statement:
    plan = prepared.plan
    lasting = plan.budget.ledger.path != Path(os.devnull)
    return statement(plan.claim, plan.budget, rounds, render_sampling(plan), lasting=lasting)


def first_messages(prepared: Prepared, grid: Grid) -> list[Message]:
    """What the strategy would send in the first round if it drew every node that trains. Nothing is sent.

    Args:
        prepared: the run.
        grid: that knows the nodes.

    Raises:
        BudgetExhausted: there would be no first round.
    """
    plan, strategy = prepared.plan, copy(prepared.plan.strategy)
    everybody = plan.config.strategy.model_copy(update={"sampling": "fixed", "fraction_train": 1.0})
    config = plan.config.model_copy(update={"strategy": everybody})
    strategy.inner = named_strategy(config, held_out=plan.held_out)
    public = ConfigRecord({SEED: plan.seed, **told_of(prepared.model)})
    if plan.config.secure_aggregation.enabled:
        public[SECURE_MESSAGE] = Delivery((), {}).encode()  # it comes in the middle of a round, with shares of peers
    return list(strategy.configure_train(1, prepared.initial, public, grid))


@dataclass(frozen=True)
class NoiseOnRelease:
    """The noise that the server adds to what it releases.

    Attributes:
        multiplier: z, calibrated if that was asked for; None: the mechanism knows none.
        std: standard deviation on one parameter of the released model, the smallest and the largest that a round can
            have; 0 or ∞ where nothing limits it.
    """

    multiplier: float | None
    std: tuple[float, float]


def noise_on_release(prepared: Prepared, nodes: int) -> NoiseOnRelease | None:
    """The noise of the first round, tried on updates that are zero; None where the server adds none.

    Args:
        prepared: the run.
        nodes: how many are connected.
    """
    strategy = prepared.plan.strategy
    if not isinstance(strategy, PrivateStrategy):
        return None
    mechanism, clients = strategy.mechanism, prepared.plan.cohort(nodes)
    if isinstance(mechanism, DistributedMean):
        std = mechanism.multiplier * mechanism.clipping_norm / max(1, round(clients))
        low, high = mechanism.scale.factors(mechanism.clip.bound, prepared.layout)
        return NoiseOnRelease(mechanism.multiplier, (std * low, std * high))
    asked, expected = max(1, round(clients)), clients + len(strategy.canaries) / 2
    sent = prepared.layout.rows(from_record(prepared.initial))
    cohort = Cohort(prepared.layout, sent, (sent,) * asked, np.zeros(asked), np.ones(asked))
    released = mechanism.release(Contributions(cohort, (1.0,) * asked, asked, expected, GaussianNoise(), 1))
    if not isinstance(mechanism, GaussianMechanism):
        return NoiseOnRelease(released.noise_multiplier, (released.noise_std, released.noise_std))
    # Zero updates are no distance apart: what the noise is at the limits of the distance is said in their place.
    scaled = (released.noise_multiplier or 0.0) / mechanism.multiplier if mechanism.multiplier else 1.0
    plain = released.noise_std / scaled
    low, high = mechanism.scale.factors(mechanism.clip.bound, prepared.layout)
    return NoiseOnRelease(mechanism.multiplier, (plain * low, plain * high))
