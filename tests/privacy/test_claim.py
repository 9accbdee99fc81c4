"""Claims as values: what a figure counts, and what reasons and conditions make of a claim about clients."""

from dataclasses import replace

import pytest
from claimed import HELD
from support import failures

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian, Pure
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.claim import DpSgdClaim, Figure, LocalClaim, OfSize

ONE = Figure("client", "add-or-remove", "so", "all", "this run", 1.0, 1e-5, "pld", {"pld": 1.0})
TWO = replace(ONE, unit="example", epsilon=2.0)
NOT = Figure("client", status="heuristic", reasons=("so",), formula="σ/√k", epsilon=0.5)
LOCAL = LocalClaim("gaussian", premises=HELD, parameters={"a": 1.0}, figures=(ONE, TWO), adversary="all")
DP_SGD = DpSgdClaim(
    "dp-sgd", premises=HELD, unit="example", sizes=(OfSize(8, 3, (ONE, TWO), (NOT,)), OfSize(9, 4, (TWO,)))
)


def test_a_figure_takes_the_tightest_accountant_and_names_the_others():
    def check(event, count, accountant, names):
        account = Account(relation="replace-one").plus(event, count)
        found = {name: account.epsilon(1e-6, name) for name in names}
        counted = replace(ONE, premises=HELD).counted(account, 1e-6)
        changes = {"epsilon": min(found.values()), "delta": 1e-6, "accountant": accountant, "by_accountant": found}
        assert counted == replace(ONE, premises=HELD, **changes)

    cases = [
        (Gaussian(4.0, Sampling("poisson", 0.1)), 10, "pld", ("rdp", "pld")),
        (Gaussian(4.0, Sampling("without-replacement", cohort=1, population=100)), 10, "rdp", ("rdp",)),
        # Each of many small losses is rounded up to a whole step.
        (Pure(1e-5), 1000, "rdp", ("rdp", "pld")),
    ]
    assert failures(cases, check) == []


@pytest.mark.parametrize("claim", [LOCAL, replace(LOCAL, reasons=("before",)), DP_SGD])
def test_reasons_are_added_and_take_every_figure_away(claim):
    refused = claim.without_guarantee(reason for reason in ("scores leave", "and labels"))
    changes = {"reasons": (*claim.reasons, "scores leave", "and labels")}
    if isinstance(claim, LocalClaim):
        changes |= {"figures": ()}
    else:
        changes |= {"sizes": (OfSize(8, 3, (), (NOT,)), OfSize(9, 4))}
    assert refused == replace(claim, **changes) and refused.status == "heuristic"
    assert claim.without_guarantee(()) is claim


def test_what_a_claim_counts_is_said_with_every_figure_of_it():
    one, two = (replace(figure, counts="so") for figure in (ONE, TWO))
    assert LOCAL.counting("so") == replace(LOCAL, figures=(one, two))
    sizes = (OfSize(8, 3, (one, two), (NOT,)), OfSize(9, 4, (two,)))
    assert DP_SGD.counting("so") == replace(DP_SGD, sizes=sizes)


def test_the_figures_of_a_unit_are_in_the_order_of_sizes_and_the_largest_counts():
    sizes = (OfSize(9, 3, (TWO,)), OfSize(8, 3, (replace(TWO, epsilon=3.0), TWO, ONE, replace(TWO, epsilon=None))))
    found = replace(DP_SGD, sizes=sizes).by_size
    assert list(found.items()) == [(8, replace(TWO, epsilon=3.0)), (9, TWO)]
