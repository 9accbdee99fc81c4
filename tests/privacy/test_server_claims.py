"""What a run may say of its releases: figures, against whom, over which runs, and on which conditions."""

import math
from collections import Counter

import pytest
from private_strategies import budget_in

from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.claim import Claim, LedgerState
from cloister.privacy.claims.record import record, statement_of
from cloister.privacy.claims.server import ALL_PLANNED, ALL_RUNS, IF_BUDGET_FIXED, IF_FIXED, OUTSIDERS, RUN, STRANGERS
from cloister.privacy.claims.server import statement as stated

SOUND = Claim("global-dp", relation="replace-one")
DRAWN = Gaussian(4.0, Sampling("without-replacement", cohort=1, population=100))


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
    assert stated(Claim("global-dp", reasons=("why",)), budget, 1, "").claim.figures == ()
    assert stated(Claim("none"), budget, 1, "").claim.figures == ()


def test_a_figure_for_the_run_and_one_for_all_runs(budget):
    release(budget, Gaussian(3.0), Gaussian(3.0))
    release(budget, Gaussian(9.0), run="other")
    run, everything = stated(SOUND, budget, 2, "").claim.figures
    assert (run.adversary, run.scope, run.condition, run.counts) == (OUTSIDERS, RUN, None, None)
    assert (run.unit, run.relation, run.delta) == ("client", "replace-one", 1e-5)
    assert run.epsilon == epsilon_of(Gaussian(3.0), Gaussian(3.0)) == min(run.by_accountant.values())
    assert (everything.adversary, everything.scope, everything.condition) == (OUTSIDERS, ALL_RUNS, IF_FIXED)
    assert everything.epsilon == epsilon_of(Gaussian(3.0), Gaussian(3.0), Gaussian(9.0))
    assert everything.budget is None is everything.filter


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


@pytest.mark.parametrize(("late", "condition"), [(False, None), (True, IF_BUDGET_FIXED)])
def test_a_budget_that_is_kept_is_the_figure_of_all_runs(budget, late, condition):
    kept = PrivacyBudget(budget.ledger, "run", max_epsilon=8.0, relation="replace-one")
    if late:
        release(budget, Gaussian(9.0), run="other")
    kept.begin("run")
    release(budget, Gaussian(3.0))
    everything = stated(SOUND, kept, 1, "").claim.figures[1]
    assert (everything.epsilon, everything.budget, everything.delta) == (8.0, True, 1e-5)
    assert (everything.filter, everything.spent) == ("Gaussian DP", kept.share())
    assert everything.condition == condition


def test_a_budget_that_was_passed_is_none(budget):
    passed = PrivacyBudget(budget.ledger, "run", max_epsilon=0.1, relation="replace-one")
    release(budget, Gaussian(1.0))
    everything = stated(SOUND, passed, 1, "").claim.figures[1]
    assert everything.budget is None and everything.condition == IF_FIXED
    assert everything.epsilon == epsilon_of(Gaussian(1.0)) > 0.1 and math.isfinite(everything.epsilon)


def test_a_budget_that_is_spent_to_the_last_is_kept(budget, monkeypatch):
    kept = PrivacyBudget(budget.ledger, "run", max_epsilon=8.0, relation="replace-one")
    monkeypatch.setattr(kept, "share", lambda: 1)
    assert stated(SOUND, kept, 1, "").claim.figures[1].budget is True
