"""Filters: a budget holds against whoever chooses each release after seeing the ones before, and is not wasted."""

import math
from functools import cache
from itertools import product

import dp_accounting
import mpmath as mp
import numpy as np
import oracles
import pytest
from accounts import account, cohorts, poisson
from dp_accounting.pld import pld_privacy_accountant
from scipy import stats
from support import failures

from cloister.privacy.accounting import account as accounts_of
from cloister.privacy.accounting.account import FINE, Account, best_epsilon
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Laplace, Pure, Repeated, Unaccounted
from cloister.privacy.accounting.filters import (
    RESERVE,
    GaussianFilter,
    RenyiFilter,
    cost,
    filter_for,
    from_json,
    minimum_multiplier,
    to_json,
)
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import OVERFLOW, UNSAMPLED, Sampling
from cloister.privacy.dpsgd.batches import places_of
from cloister.utils.errors import BudgetExhausted, ConfigError, PrivacyError

SMALL = 1e-5
BUDGETS = pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (8.0, 1e-5), (3.0, 1e-2), (40.0, 1e-9)]
)


def room(order, epsilon, delta):
    """B(α), from the conversion as it is printed: ε = B + (ln(1/δ) + (α - 1)·ln(1 - 1/α) - ln α)/(α - 1)."""
    a = mp.mpf(order)
    return float(epsilon - (mp.log(1 / mp.mpf(delta)) + (a - 1) * mp.log(1 - 1 / a) - mp.log(a)) / (a - 1))


class TestTheLimit:
    @BUDGETS
    def test_of_gaussian_dp_is_where_the_exact_curve_meets_delta(self, epsilon, delta):
        mu, left = math.sqrt(GaussianFilter().limit(epsilon, delta)), (1 - RESERVE) * delta
        assert oracles.gaussian_delta(epsilon, 1 / mu) == pytest.approx(left, rel=1e-6)
        assert oracles.gaussian_delta(epsilon, 1 / (mu * (1 + 1e-6))) > left

    @BUDGETS
    def test_of_rényi_dp_is_the_conversion_turned_round(self, epsilon, delta):
        for order in (1.5, 4, 64):
            assert RenyiFilter(order).limit(epsilon, delta) == pytest.approx(
                max(0, room(order, epsilon, (1 - RESERVE) * delta)), rel=1e-9
            )

    @BUDGETS
    def test_what_fills_it_is_within_the_budget_by_the_truth(self, epsilon, delta):
        chosen = filter_for("renyi", epsilon, delta)
        z = math.sqrt(chosen.order / 2 / chosen.limit(epsilon, delta))
        assert 0.01 * delta < oracles.gaussian_delta(epsilon, z) <= delta

    @BUDGETS
    def test_the_order_has_room_for_the_most_gaussian_releases(self, epsilon, delta):
        chosen = filter_for("renyi", epsilon, delta)
        workspaces = {order: room(order, epsilon, delta) / order for order in FINE}
        assert chosen.order in FINE and workspaces[chosen.order] == pytest.approx(max(workspaces.values()))

    def test_a_budget_that_no_order_shows_has_no_room(self):
        """ε = 0.001 is below what the conversion of the largest order takes: everything is refused."""
        assert filter_for("renyi", 1e-3, SMALL).limit(1e-3, SMALL) == 0


class TestWhatAReleaseCosts:
    def test_without_a_draw(self):
        assert cost(GaussianFilter(), Gaussian(4.0)) == pytest.approx(1 / 16)
        assert cost(RenyiFilter(6.0), Gaussian(4.0)) == pytest.approx(6 / 32)

    def test_under_replace_one_four_times_as_much(self):
        for chosen in (GaussianFilter(), RenyiFilter(6.0)):
            assert cost(chosen, Gaussian(4.0), "replace-one") == pytest.approx(4 * cost(chosen, Gaussian(4.0)))

    def test_a_draw_counts_for_rényi_dp_alone(self):
        drawn = Gaussian(1.0, poisson(0.01))
        assert cost(GaussianFilter(), drawn) == 1
        assert cost(RenyiFilter(8), drawn) == pytest.approx(oracles.renyi(oracles.poisson(1.0, 0.01), 8), rel=1e-9)

    def test_a_draw_of_a_fixed_size_hides_nothing_from_the_clients_together(self):
        """All others know who was left: a budget that holds against them counts such a draw as none."""
        for chosen, relation in product((GaussianFilter(), RenyiFilter(6.0)), ("add-or-remove", "replace-one")):
            drawn = cost(chosen, Gaussian(4.0, cohorts(1, 100)), relation)
            assert drawn == pytest.approx(cost(chosen, Gaussian(4.0), "replace-one")), (chosen, relation)

    def test_many_cost_as_many_as_they_are(self):
        drawn = Gaussian(2.0, poisson(0.1))
        for chosen in (GaussianFilter(), RenyiFilter(6.0)):
            assert cost(chosen, Repeated(drawn, 7)) == pytest.approx(7 * cost(chosen, drawn))

    def test_what_has_no_bound_costs_everything(self):
        events = (Unaccounted("no noise"), Laplace(0.1, 1.0), Laplace(1e-9, 0.0), Gaussian(0.0))
        pairs = product((GaussianFilter(), RenyiFilter(6.0)), events)
        costs = {(chosen, event): cost(chosen, event) for chosen, event in pairs}
        assert set(costs.values()) == {math.inf}, costs

    def test_costs_add_up_to_those_of_the_account(self):
        events = [Gaussian(2.0), Repeated(Gaussian(3.0, poisson(0.1)), 40), Pure(0.3), Gaussian(9.0), Pure(0.3)]
        for chosen in (GaussianFilter(), RenyiFilter(3.9)):
            assert sum(cost(chosen, event) for event in events) == pytest.approx(chosen.spent(Account(events)))


# --- an adversary who chooses ---

X = np.linspace(-60, 60, 24_001)
"""Outcomes of a release whose deviation is at most 6, in steps of 0.005."""


def tradeoff(z, epsilon):
    """∫ max(0, P - e^ε·Q) of one Gaussian release, for any real ε; z = ∞ is no release."""
    if math.isinf(z):
        return np.maximum(0, -np.expm1(epsilon))
    return stats.norm.cdf(1 / (2 * z) - epsilon * z) - np.exp(epsilon + stats.norm.logcdf(-1 / (2 * z) - epsilon * z))


def adaptive_delta(epsilon, first, above, below, threshold):
    """δ of an adversary who sees N(b, first²) and goes on with multiplier `above` or `below` a threshold."""
    worst = 0.0
    for mean, other in ((1, 0), (0, 1)):
        p, q = (stats.norm.pdf(X, m, first) for m in (mean, other))
        loss = (stats.norm.logpdf(X, mean, first) - stats.norm.logpdf(X, other, first)) * (p + q > 0)
        rest = epsilon - loss
        hidden = np.where(threshold < X, tradeoff(above, rest), tradeoff(below, rest))
        worst = max(worst, float(np.trapezoid(p * hidden, X)))
    return worst


class TestWhoeverChooses:
    """The hockey-stick divergence of two releases, the second of which depends on the first, by quadrature."""

    EPSILON, DELTA = 1.0, 1e-3

    def rest(self, first, share=1.0):
        """The multiplier that fills the Gaussian filter, or a larger budget, after a release with `first`."""
        return (share * GaussianFilter().limit(self.EPSILON, self.DELTA) - first**-2) ** -0.5

    def test_the_quadrature_gives_the_closed_form_where_nobody_chooses(self):
        for first in (3.5, 4.0, 5.5):
            joint = (first**-2 + 3.0**-2) ** -0.5
            found = adaptive_delta(self.EPSILON, first, 3.0, 3.0, 0.0)
            assert found == pytest.approx(oracles.gaussian_delta(self.EPSILON, joint), rel=1e-6), first

    def test_stays_within_the_budget_of_a_gaussian_filter(self):
        def check(first, threshold):
            full = self.rest(first)
            for above, below in ((full, math.inf), (math.inf, full), (full, 2 * full), (full, full)):
                assert adaptive_delta(self.EPSILON, first, above, below, threshold) <= self.DELTA * (1 + 1e-6)
            spent = adaptive_delta(self.EPSILON, first, full, full, threshold)
            assert spent == pytest.approx((1 - RESERVE) * self.DELTA, rel=1e-6)

        assert failures(product((3.5, 4.0, 5.5), (-5.0, 0.5, 4.0)), check) == []

    def test_and_would_not_stay_within_a_tenth_less(self):
        """The positive control: a filter that allows 10 % more is found out."""
        full = self.rest(4.0, share=1.1)
        assert adaptive_delta(self.EPSILON, 4.0, full, math.inf, 0.0) > self.DELTA

    def test_stays_within_the_budget_of_a_rényi_filter(self):
        """One release drawn with q = 0.2, then as the outcome says a Gaussian without a draw, or drawn ones."""

        def check(threshold):
            chosen = filter_for("renyi", self.EPSILON, self.DELTA)
            left = chosen.limit(self.EPSILON, self.DELTA) - cost(chosen, Gaussian(1.5, poisson(0.2)))
            plain = minimum_multiplier(lambda z: cost(chosen, Gaussian(z)), left, "")
            drawn = minimum_multiplier(lambda z: cost(chosen, Gaussian(z, poisson(0.2))), left, "")
            found = [
                chosen_between(self.EPSILON, [(1.5, 0.2), above, below], threshold)
                for above, below in (((plain, 1.0), (drawn, 0.2)), ((drawn, 0.2), (plain, 1.0)))
            ]
            assert 0.01 * self.DELTA < max(found) <= self.DELTA

        assert failures([-4.0, 0.5, 5.0], check) == []

    def test_that_adversary_too_is_found_out_where_it_is_given_too_much(self):
        assert chosen_between(self.EPSILON, [(1.5, 0.2), (0.8, 1.0), (0.8, 0.2)], 0.5) > self.DELTA


def chosen_between(epsilon, releases, threshold):
    """δ of a Poisson-sampled release followed by one of two others, each (z, q), on a grid of both outcomes."""
    grid = np.linspace(-45, 45, 1801)
    step = grid[1] - grid[0]

    def densities(release):
        z, q = release
        nothing = stats.norm.pdf(grid, 0, z)
        return (1 - q) * nothing + q * stats.norm.pdf(grid, 1, z), nothing

    first, above, below = map(densities, releases)
    worst = 0.0
    for p, q in ((0, 1), (1, 0)):
        total = 0.0
        for where, second in ((grid > threshold, above), (grid <= threshold, below)):
            with_, without = (np.outer(first[side][where], second[side]) for side in (p, q))
            total += float(np.maximum(0, with_ - math.exp(epsilon) * without).sum()) * step**2
        worst = max(worst, total)
    return worst


class TestTheSmallestOrderAfterwards:
    """To take the tightest figure when everything is over allows an adversary more than any one order bounds."""

    EPSILON = 8.0
    FEW = Gaussian(4.0)
    MANY = Gaussian(0.55, poisson(0.02))

    @cache  # noqa: B019  the class has no state
    def filled(self, event):
        """One release, then as many more of a kind as the smallest ε over all orders lets pass."""
        found = Account([self.FEW])
        while best_epsilon(more := found.plus(event), SMALL)[0] <= self.EPSILON:
            found = more
        return found

    def test_no_order_covers_both_ways_of_going_on(self):
        ways = [self.filled(event) for event in (self.FEW, self.MANY)]
        for order in FINE:
            assert max(way.renyi(order) for way in ways) > room(order, self.EPSILON, SMALL)

    def test_a_filter_stops_in_time_either_way(self):
        chosen = filter_for("renyi", self.EPSILON, SMALL)
        for event in (self.FEW, self.MANY):
            allowed = (chosen.limit(self.EPSILON, SMALL) - cost(chosen, self.FEW)) // cost(chosen, event)
            within = Account([self.FEW]).plus(event, int(allowed))
            assert best_epsilon(within, SMALL)[0] <= self.EPSILON
            assert chosen.spent(self.filled(event)) >= chosen.spent(within)
        assert chosen.spent(self.filled(self.MANY)) > 1.05 * chosen.limit(self.EPSILON, SMALL)


class TestInTheLedger:
    def test_a_filter_comes_back(self):
        filters = [GaussianFilter(), RenyiFilter(12.0), RenyiFilter(1.1)]
        assert [from_json(to_json(chosen)) for chosen in filters] == filters

    def test_one_that_is_not_understood_is_refused(self):
        contents = [
            {},
            None,
            "gaussian",
            {"kind": "pld"},
            {"kind": ["renyi"]},
            {"kind": "renyi"},
            {"kind": "renyi", "order": 1.0},
            {"kind": "renyi", "order": math.inf},
            {"kind": "renyi", "order": math.nan},
            {"kind": "renyi", "order": "2"},
            {"kind": "renyi", "order": True},
            {"kind": "gaussian", "order": 2.0},
        ]
        for content in contents:
            with pytest.raises(PrivacyError):
                from_json(content)

    def test_a_kind_that_is_not_known_is_named(self):
        with pytest.raises(ConfigError, match=r"filter must be one of .*; got 'pld'"):
            filter_for("pld", 1.0, SMALL)


def planned(sampling, epsilon):
    return filter_for("renyi" if sampling.kind == "poisson" else "gaussian", epsilon, SMALL)


def smallest(chosen, epsilon, rounds, sampling=UNSAMPLED, relation="add-or-remove"):
    """The smallest z with which a budget allows so many releases."""
    return minimum_multiplier(
        lambda z: rounds * cost(chosen, Gaussian(z, sampling), relation), chosen.limit(epsilon, SMALL), "a budget"
    )


class TestCalibration:
    CASES = pytest.mark.parametrize(
        ("epsilon", "rounds", "sampling", "relation"),
        [
            (1.0, 1, UNSAMPLED, "add-or-remove"),
            (8.0, 100, UNSAMPLED, "replace-one"),
            (2.0, 500, poisson(0.02), "add-or-remove"),
            (3.0, 10, cohorts(5, 100), "replace-one"),
        ],
    )

    @CASES
    def test_the_multiplier_is_enough_and_no_more(self, epsilon, rounds, sampling, relation):
        chosen = planned(sampling, epsilon)
        z = smallest(chosen, epsilon, rounds, sampling, relation)
        spent = [chosen.spent(account(x, sampling, rounds, relation)) for x in (z, z / 1.002)]
        assert spent[0] <= chosen.limit(epsilon, SMALL) < spent[1]

    def test_a_single_release_needs_what_the_closed_form_says(self):
        truth = oracles.gaussian_epsilon(SMALL, smallest(GaussianFilter(), 1.0, 1))
        assert 0.998 < truth <= 1.0

    def test_what_no_noise_can_do_is_refused(self):
        with pytest.raises(ConfigError, match=r"no noise multiplier up to 1e\+06 stays within a budget of ε = 1"):
            minimum_multiplier(lambda z: 2.0, 1.0, "a budget of ε = 1")


def test_a_budget_about_replacing_a_client_stays_one_in_later_runs(tmp_path):
    """A run without a registered population counts the same releases as half as costly; the first promise does not."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    first = PrivacyBudget(ledger, "first", max_epsilon=4.0, relation="replace-one")
    first.begin("first")
    spend_all(first)
    later = PrivacyBudget(ledger, "later", max_epsilon=4.0)
    later.begin("later")
    with pytest.raises(BudgetExhausted):
        later.require([Gaussian(4.0)])
    assert first.share() == later.share() <= 1
    assert [budget.relation for budget in Ledger(ledger.path).budgets] == ["replace-one", "add-or-remove"]


def spend_all(budget):
    """Releases until one more would pass the budget."""
    with pytest.raises(BudgetExhausted):
        for number in range(1000):
            with budget.release(Gaussian(4.0), number):
                pass


def test_the_search_ends_at_most_one_part_in_a_thousand_above_what_suffices():
    for smallest in (0.0013, 0.02, 0.9, 1.0, 1.1, 7.0, 3e4):
        found = minimum_multiplier(lambda multiplier, least=smallest: least / multiplier, 1.0, "a budget")
        assert smallest <= found <= smallest * 1.0011


class TestExactly:
    def test_costs_are_for_joining_or_leaving_unless_asked(self):
        assert cost(GaussianFilter(), Gaussian(4.0)) == cost(GaussianFilter(), Gaussian(4.0), "add-or-remove")

    def test_the_texts(self):
        assert (str(GaussianFilter()), str(RenyiFilter(6.5))) == ("Gaussian DP", "Rényi DP of order 6.5")
        assert to_json(GaussianFilter()) == {"kind": "gaussian"}
        assert to_json(RenyiFilter(6.5)) == {"kind": "renyi", "order": 6.5}
        for order in (1.0, math.inf, math.nan, "2", True):
            with pytest.raises(PrivacyError) as refused:
                RenyiFilter(order)
            assert str(refused.value) == f"the order of a Rényi filter must be a number above 1, got {order!r}"
        for content, kind in (
            ({}, "None"),
            ({"kind": "pld"}, "'pld'"),
            (None, "None"),
            ({"kind": ["renyi"]}, "['renyi']"),
        ):
            with pytest.raises(PrivacyError) as refused:
                from_json(content)
            assert str(refused.value) == f"unknown kind of filter {kind}; known: gaussian, renyi"
        with pytest.raises(PrivacyError, match=r"^a 'gaussian' filter does not have these fields: .*'order'"):
            from_json({"kind": "gaussian", "order": 2.0})

    def test_the_largest_multiplier_that_is_looked_for(self):
        assert minimum_multiplier(lambda z: 4e5 / z, 1.0, "") == pytest.approx(4e5, rel=1.1e-3)
        assert minimum_multiplier(lambda z: 9e5 / z, 1.0, "") == pytest.approx(9e5, rel=1.1e-3)
        assert minimum_multiplier(lambda z: 1e-2 / z, 1.0, "") == pytest.approx(1e-2, rel=1.1e-3)
        with pytest.raises(ConfigError, match=r"stays within so much$"):
            minimum_multiplier(lambda z: 1.1e6 / z, 1.0, "so much")

    def test_a_limit_is_left_by_the_rounding_of_a_ledger(self):
        """Costs of exactly the limit are one part in 10⁹ too many."""
        assert minimum_multiplier(lambda z: 1.0 if z >= 2 else 9.0, 1.0 + 1e-6, "") == pytest.approx(2, rel=2e-3)
        with pytest.raises(ConfigError):
            minimum_multiplier(lambda z: 1.0, 1.0, "")

    def test_a_filter_of_rényi_has_a_float_for_an_order(self):
        chosen = filter_for("renyi", 2.0, SMALL)
        assert type(chosen.order) is float and from_json(to_json(chosen)) == chosen


class TestDrawsThatFillAllPlaces:
    """Nothing is claimed of them: their probability is part of δ."""

    STEP = Gaussian(1.0, Sampling("bounded-poisson", 0.01))
    PLAIN = Gaussian(1.0, Sampling("poisson", 0.01))

    def test_delta_is_larger_by_their_probability(self):
        def check(accountant):
            steps = [Account().plus(event, 1000) for event in (self.STEP, self.PLAIN)]
            left = 1e-5 - 1000 * OVERFLOW
            assert steps[0].epsilon(1e-5, accountant) == steps[1].epsilon(left, accountant)
            epsilon = steps[1].epsilon(1e-9, accountant)
            assert steps[0].delta(epsilon, accountant) == steps[1].delta(epsilon, accountant) + 1000 * OVERFLOW

        assert failures(["rdp", "pld"], check) == []

    def test_a_delta_that_has_no_room_for_them_is_never_reached(self):
        assert Account().plus(self.STEP, 1000).epsilon(1000 * OVERFLOW) == math.inf

    def test_epsilon_is_that_of_truncated_draws_by_dp_accounting(self, monkeypatch):
        """Its draws leave out units that find no place, which needs the number of all units."""
        monkeypatch.setattr(accounts_of, "LOSS_STEP", 1e-3)
        batch, units, steps = 64, 6400, 1000
        room = places_of(batch)
        event = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(units, batch / units, room, 1.0)
        accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-3)
        theirs = accountant.compose(event, steps).get_epsilon(1e-5)
        assert Account().plus(self.STEP, steps).epsilon(1e-5, "pld") == pytest.approx(theirs, rel=1e-6)

    def test_a_budget_has_room_for_a_thousandth_of_delta_of_them(self, tmp_path):
        delta = 200.5 * OVERFLOW / RESERVE
        budget = PrivacyBudget(Ledger(tmp_path / "data.jsonl"), "run", "example", delta=delta, max_epsilon=1e3)
        assert budget.fits([Gaussian(1e3, Sampling("bounded-poisson", 1e-3))]) == 200
        assert budget.fits([Gaussian(1e3, Sampling("poisson", 1e-3))]) > 1e6
        budget.spend(Repeated(Gaussian(1e3, Sampling("bounded-poisson", 1e-3)), 200), 1)
        with pytest.raises(BudgetExhausted, match=r"has room for 200 steps of DP-SGD, and .* would hold 201"):
            budget.spend(Gaussian(1e3, Sampling("bounded-poisson", 1e-3)), 2)

    def test_releases_that_were_made_without_a_budget_show_in_what_is_spent(self, tmp_path):
        ledger, step = Ledger(tmp_path / "data.jsonl"), Gaussian(300.0, Sampling("bounded-poisson", 1e-3))
        PrivacyBudget(ledger, "free", "example").spend(Repeated(step, 2000), 1)
        budget = PrivacyBudget(ledger, "kept", "example", delta=1e-12, max_epsilon=8.0)
        assert budget.share() > 1 and budget.fits([step]) == 0

    def test_what_stands_for_several_steps_has_the_probability_of_all(self):
        assert Repeated(self.STEP, 10).overflow == 10 * OVERFLOW == Repeated(self.STEP, 10).replaced().overflow
        assert Account([Repeated(self.STEP, 10)]).overflow == 10 * OVERFLOW and self.PLAIN.overflow == 0
