"""A run's claims about its releases: figures, against whom, over which runs, and on which conditions."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from claimed import HELD
from private_strategies import budget_in

from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import DistributedGaussian, Gaussian, Unaccounted
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.claim import Claim, Figure, LedgerState, LocalClaim, Statement
from cloister.privacy.claims.premises import BUDGET_FIXED, EARLIER, UNCHOSEN
from cloister.privacy.claims.server import (
    ALL_PLANNED,
    ALL_RUNS,
    NO_CLIENT,
    OUTSIDERS,
    RUN,
    STRANGERS,
    ZEROED,
)
from cloister.privacy.claims.server import statement as stated
from cloister.privacy.claims.to_json import record, statement_of
from cloister.privacy.mechanisms.distributed.shares import COLLUDING

SOUND = Claim("global-dp", premises=HELD, relation="replace-one")
SECURE = Claim("global-dp", premises=HELD, parameters={COLLUDING: 1}, by_provisioner=())
DRAWN = Gaussian(4.0, Sampling("without-replacement", cohort=1, population=100))
SHARED = DistributedGaussian(4, 2.0**20, 2.0**20, 650)


@pytest.fixture
def budget(tmp_path):
    return budget_in(tmp_path, relation="replace-one")


def release(budget, *events, run="run", unit="client"):
    for event in events:
        if (run, unit) == ("run", "client"):
            budget.spend(event, 1)
        else:
            budget.ledger.open(event, unit, run, 1, lambda: None)


def epsilon_of(*events, insiders=True):
    return best_epsilon(Account(events, "replace-one", insiders), 1e-5)[0]


def test_what_it_says_beside_figures(budget):
    release(budget, Gaussian(3.0), Gaussian(3.0))
    release(budget, Gaussian(9.0), run="other")
    said = stated(SOUND, budget, 7, "everybody")
    assert (said.rounds, said.sampling, said.clients) == (7, "everybody", None)
    assert said.ledger == LedgerState("ledger.jsonl", budget.ledger.head, 2, False)
    assert (said.claim.mechanism, said.claim.relation) == ("global-dp", "replace-one")


def test_without_soundness_it_has_none(budget):
    release(budget, Gaussian(3.0))
    assert stated(Claim("global-dp", premises=HELD, reasons=("why",)), budget, 1, "").claim.figures == ()
    assert stated(Claim("none"), budget, 1, "").claim.figures == ()


def counted(account, adversary=OUTSIDERS, scope=RUN, **more):
    """A figure about one client by Gaussian noise without draws."""
    found = {"rdp": account.epsilon(1e-5, "rdp"), "pld": account.epsilon(1e-5, "pld")}
    figure = Figure("client", account.relation, None, adversary, scope, found["pld"], 1e-5, "pld", found)
    return replace(figure, **more)


def account_of(*events):
    return Account(events, "replace-one", True)


def test_a_figure_for_the_run_and_one_for_all_runs(budget):
    release(budget, Gaussian(3.0), Gaussian(3.0))
    release(budget, Gaussian(9.0), run="other")
    everything = counted(
        account_of(Gaussian(3.0), Gaussian(3.0), Gaussian(9.0)), scope=ALL_RUNS, premises=(UNCHOSEN, EARLIER)
    )
    figures = (counted(account_of(Gaussian(3.0), Gaussian(3.0))), everything)
    ledger = LedgerState("ledger.jsonl", budget.ledger.head, 2, False, lasting=True)
    clients = LocalClaim("gaussian", premises=HELD, adversary="all")
    for said_of_clients in (clients, None):
        assert stated(SOUND, budget, 7, "everybody", said_of_clients) == Statement(
            replace(SOUND, figures=figures), 7, "everybody", ledger, said_of_clients, ()
        )
    alone = stated(SOUND, budget, 7, "everybody", lasting=False).ledger
    assert alone == replace(ledger, lasting=False)


def test_what_strangers_learn_where_a_draw_hides_it_from_them(budget):
    release(budget, DRAWN, DRAWN)
    run, _, strangers = stated(SOUND, budget, 2, "").claim.figures
    assert (strangers.adversary, strangers.scope) == (STRANGERS, RUN)
    assert strangers.epsilon == epsilon_of(DRAWN, DRAWN, insiders=False) < run.epsilon == epsilon_of(DRAWN, DRAWN)


def test_where_an_earlier_run_was_unprotected_nothing_is_said_of_all(budget):
    release(budget, Unaccounted("x"), run="other")
    release(budget, Gaussian(3.0))
    said = stated(SOUND, budget, 1, "")
    assert [figure.scope for figure in said.claim.figures] == [RUN]
    assert said.ledger.holds_releases_without_a_guarantee


def test_a_run_that_was_ended_is_counted_as_planned(budget):
    release(budget, Gaussian(3.0))
    release(budget, Gaussian(9.0), run="other")
    planned = [Gaussian(3.0)] * 5
    said = stated(SOUND, budget, 1, "", planned=Counter(planned))
    run, everything = said.claim.figures
    assert said.planned == ((Gaussian(3.0), 4),), "one of the five is in the ledger"
    assert statement_of(record(said)).planned == said.planned
    assert run.counts == everything.counts == ALL_PLANNED
    assert run.epsilon == epsilon_of(*planned) and everything.epsilon == epsilon_of(*planned, Gaussian(9.0))


@pytest.mark.parametrize(
    ("late", "premises"), [(False, (BUDGET_FIXED.known_as("enforced"),)), (True, (BUDGET_FIXED, EARLIER))]
)
def test_a_budget_that_is_kept_is_the_figure_of_all_runs(budget, late, premises):
    kept = PrivacyBudget(budget.ledger, "run", max_epsilon=8.0, relation="replace-one")
    if late:
        release(budget, Gaussian(9.0), run="other")
    kept.begin("run")
    release(budget, Gaussian(3.0))
    everything = stated(SOUND, kept, 1, "").claim.figures[1]
    assert (everything.epsilon, everything.budget, everything.delta) == (8.0, True, 1e-5)
    assert (everything.filter, everything.spent) == ("Gaussian DP", kept.share())
    assert everything.premises == premises


def test_a_budget_that_was_passed_is_none(budget):
    passed = PrivacyBudget(budget.ledger, "run", max_epsilon=0.1, relation="replace-one")
    release(budget, Gaussian(1.0))
    everything = stated(SOUND, passed, 1, "").claim.figures[1]
    assert everything.budget is None and everything.premises == (UNCHOSEN,)
    assert everything.epsilon == epsilon_of(Gaussian(1.0)) > 0.1 and math.isfinite(everything.epsilon)


def test_a_budget_that_is_spent_to_the_last_is_kept(budget, monkeypatch):
    kept = PrivacyBudget(budget.ledger, "run", max_epsilon=8.0, relation="replace-one")
    monkeypatch.setattr(kept, "share", lambda: 1)
    assert stated(SOUND, kept, 1, "").claim.figures[1].budget is True
    monkeypatch.setattr(kept, "share", lambda: math.nextafter(1, 2))
    assert stated(SOUND, kept, 1, "").claim.figures[1].budget is None


def test_before_anything_is_released_nobody_is_told_apart_as_a_stranger(budget):
    run, everything = stated(SOUND, budget, 0, "").claim.figures
    assert (run.epsilon, run.scope, everything.epsilon, everything.scope) == (0.0, RUN, 0.0, ALL_RUNS)


def test_a_run_that_broke_off_counts_what_is_recorded(budget):
    release(budget, DRAWN)
    run, everything, strangers = stated(SOUND, budget, 1, "", resumed=True).claim.figures
    assert run.premises == strangers.premises == () and everything.premises == (UNCHOSEN,)
    assert run.epsilon == epsilon_of(DRAWN) and run.counts is None


@pytest.mark.parametrize(("released", "forgotten", "planned"), [(1, 0, 3), (1, 3, 2), (0, 0, 1)])
def test_a_run_that_broke_off_and_was_ended_counts_what_is_more(budget, released, forgotten, planned):
    """A directory that was put back to an earlier state knows nothing of what the ledger holds since then."""
    event = Gaussian(50.0)
    release(budget, *[event] * released)
    for _ in range(forgotten):
        budget.ledger.open(event, "client", "run", 1, lambda: None)
    run, everything = stated(SOUND, budget, 1, "", None, Counter({event: planned}), True).claim.figures
    more = account_of(*[event] * max(released + forgotten, planned))
    assert run == counted(more, counts=ALL_PLANNED)
    all_runs = account_of(*[event] * (forgotten + planned))
    assert everything == counted(all_runs, scope=ALL_RUNS, premises=(UNCHOSEN,), counts=ALL_PLANNED)
    ended = stated(SOUND, budget, 1, "", planned=Counter({event: planned})).claim.figures[0]
    assert ended == counted(account_of(*[event] * planned), counts=ALL_PLANNED)


def test_what_a_run_that_broke_off_released_hides_from_strangers_what_its_draws_do(budget):
    release(budget, DRAWN, DRAWN, DRAWN)
    run, _, strangers = stated(SOUND, budget, 1, "", planned=Counter([DRAWN]), resumed=True).claim.figures
    assert run.epsilon == epsilon_of(DRAWN, DRAWN, DRAWN)
    assert strangers.epsilon == epsilon_of(DRAWN, DRAWN, DRAWN, insiders=False)


def test_a_draw_that_hides_everything_from_strangers_is_told(tmp_path):
    budget = budget_in(tmp_path, relation="replace-one", delta=0.1)
    release(budget, DRAWN)
    run, _, strangers = stated(SOUND, budget, 1, "").claim.figures
    assert run.epsilon > strangers.epsilon == 0 and strangers.adversary == STRANGERS


def test_what_was_planned_hides_from_strangers_what_its_draws_do(budget):
    run, everything, strangers = stated(SOUND, budget, 1, "", planned=Counter([DRAWN, DRAWN])).claim.figures
    assert run.epsilon == everything.epsilon == epsilon_of(DRAWN, DRAWN)
    assert strangers.epsilon == epsilon_of(DRAWN, DRAWN, insiders=False) < run.epsilon
    assert {figure.counts for figure in (run, everything, strangers)} == {ALL_PLANNED}


def test_without_soundness_nothing_counts_as_planned(budget):
    said = stated(Claim("metric", premises=HELD, reasons=("why",)), budget, 1, "", planned=Counter([DRAWN]))
    assert said.planned == () and said.claim.figures == ()
    assert stated(SOUND, budget, 1, "").planned == ()


@pytest.mark.parametrize("kept", [False, True])
def test_secure_aggregation_zeroes_an_update_of_a_client(tmp_path, kept):
    budget = budget_in(tmp_path, max_epsilon=8.0 if kept else 0.0)
    if kept:
        budget.begin("run")
    release(budget, SHARED)
    run, everything, *_ = stated(SECURE, budget, 1, "").claim.figures
    assert (run.neighbours, everything.neighbours, everything.adversary) == (ZEROED, ZEROED, NO_CLIENT)
    assert (run.scope, everything.scope, everything.budget) == (RUN, ALL_RUNS, True if kept else None)


@pytest.mark.parametrize(
    ("unit", "adversary", "neighbours"), [("client", NO_CLIENT, ZEROED), ("example", OUTSIDERS, None)]
)
def test_shares_in_another_run_count_where_they_are_about_the_same_unit(budget, unit, adversary, neighbours):
    release(budget, Gaussian(4.0))
    release(budget, SHARED, run="other", unit=unit)
    run, everything = stated(SOUND, budget, 1, "").claim.figures
    assert (run.adversary, run.neighbours) == (OUTSIDERS, None)
    assert (everything.adversary, everything.neighbours) == (adversary, neighbours)


def test_a_budget_stands_for_all_runs_where_a_run_was_ended_too(budget):
    kept = PrivacyBudget(budget.ledger, "run", max_epsilon=8.0, relation="replace-one")
    kept.begin("run")
    kept.spend(Gaussian(3.0), 1)
    _, everything = stated(SOUND, kept, 1, "", planned=Counter([Gaussian(3.0)] * 2)).claim.figures
    assert everything == Figure(
        "client",
        "replace-one",
        adversary=OUTSIDERS,
        scope=ALL_RUNS,
        epsilon=8.0,
        delta=1e-5,
        counts=ALL_PLANNED,
        budget=True,
        filter="Gaussian DP",
        spent=kept.share(),
        premises=(BUDGET_FIXED.known_as("enforced"),),
    )
