"""Tables of the literature and known values, and relations between accountants."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from cloister.core.errors import ConfigError
from cloister.privacy.accounting import (
    COARSE,
    MOST_CURVES,
    Account,
    best_epsilon,
    noise_multiplier_for,
    rounds_for,
)
from cloister.privacy.events import Gaussian, Sampling, Unaccounted

# σ, client rate C, rounds, δ per example at ε = 1.31, δ per client at ε = 8; batch 100 of 600, one epoch.
THESIS = [
    (4.0, 0.1, 640, 9.2e-6, 1.04e-3),
    (3.0, 0.1, 288, 8.9e-7, 9.7e-4),
    (2.0, 0.1, 54, 1.2e-11, 4.2e-4),
    (4.0, 0.05, 1740, 2.7e-8, 9.7e-6),
    (1.85, 0.005, 15000, None, 8.9e-6),
]
STEPS = 6


def poisson(multiplier, probability, count):
    return Account().plus(Gaussian(multiplier, Sampling("poisson", probability=probability)), count)


def per_example(sigma, rate, rounds):
    return poisson(sigma, rate / STEPS, rounds * STEPS)


def per_client(sigma, rate, rounds):
    return poisson(sigma / math.sqrt(STEPS), rate, rounds)


def same_digits(found, printed):
    return f"{found:.0e}" == f"{printed:.0e}" and found == pytest.approx(printed, rel=0.02)


@pytest.mark.parametrize("row", THESIS)
def test_the_published_table(row):
    sigma, rate, rounds, example, client = row
    assert same_digits(per_client(sigma, rate, rounds).delta(8.0, "published"), client)
    if example is not None:
        assert same_digits(per_example(sigma, rate, rounds).delta(1.31, "published"), example)


@pytest.mark.parametrize("row", THESIS)
def test_todays_conversion_is_tighter(row):
    for account, epsilon in ((per_example(*row[:3]), 1.31), (per_client(*row[:3]), 8.0)):
        assert account.delta(epsilon) < account.delta(epsilon, "published")


def test_todays_values_of_the_first_row():
    assert per_example(*THESIS[0][:3]).delta(1.31) == pytest.approx(1.8e-7, rel=0.02)
    assert per_client(*THESIS[0][:3]).delta(8.0) == pytest.approx(1.5e-4, rel=0.03)


def test_replacing_one_costs_twice_the_sensitivity():
    events = [Gaussian(1.0)] * 10
    one, two = Account(events), Account(events, "replace-one")
    assert one.epsilon(1e-5, "rdp") == pytest.approx(19.05, abs=0.01)
    assert two.epsilon(1e-5, "rdp") == pytest.approx(48.80, abs=0.01)
    assert two.epsilon(1e-5, "pld") == pytest.approx(46.21, abs=0.01)


def test_dp_accountings_own_rdp_forgets_the_factor():
    """The control for the test above."""
    theirs = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE).compose(GaussianDpEvent(1.0), 10)
    assert theirs.get_epsilon(1e-5) == pytest.approx(19.05, abs=0.01)


SOUND = [
    Account().plus(Gaussian(z, Sampling("poisson", probability=q)) if q < 1 else Gaussian(z), rounds)
    for z in (0.8, 2.0)
    for q in (0.05, 1.0)
    for rounds in (1, 40)
]


@pytest.mark.parametrize("account", SOUND)
def test_the_order_of_the_accountants(account):
    for delta in (1e-7, 1e-5, 1e-3):
        pld, rdp, published = (account.epsilon(delta, name) for name in ("pld", "rdp", "published"))
        assert pld <= rdp * (1 + 1e-6) + 1e-6 and rdp <= published * (1 + 1e-6)


@pytest.mark.parametrize("relation", ["add-or-remove", "replace-one"])
def test_rdp_is_never_below_pld_under_either_relation(relation):
    for sampling in (Sampling(), Sampling("poisson", probability=0.2)):
        account = Account(relation=relation).plus(Gaussian(1.5, sampling), 20)
        assert account.epsilon(1e-5, "rdp") >= account.epsilon(1e-5, "pld") - 1e-6


def test_a_draw_without_replacement_helps_only_under_replace_one():
    event = Gaussian(2.0, Sampling("without-replacement", cohort=10, population=100))
    whole = Gaussian(2.0)
    assert Account([event] * 9, "replace-one").epsilon(1e-5) < Account([whole] * 9, "replace-one").epsilon(1e-5)
    halved = Account([Gaussian(1.0)] * 9).epsilon(1e-5)
    assert Account([event] * 9).epsilon(1e-5) == pytest.approx(halved)


def test_rounds_that_differ_compose_to_one_gaussian():
    multipliers = np.linspace(0.9, 4.0, 50)
    account = Account(Gaussian(float(z)) for z in multipliers)
    together = Account([Gaussian(float(1 / np.sqrt((multipliers**-2.0).sum())))])
    for name in ("rdp", "pld", "published"):
        assert account.epsilon(1e-5, name) == pytest.approx(together.epsilon(1e-5, name), rel=1e-9)


def test_many_different_sampled_rounds_cost_a_little_more_and_never_less():
    sampling = Sampling("poisson", probability=0.05)
    multipliers = [1.0 + 0.01 * number for number in range(MOST_CURVES + 8)]
    grouped = Account(Gaussian(z, sampling) for z in multipliers).epsilon(1e-5)
    exact = RdpAccountant(COARSE)
    for z in multipliers:
        exact.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(z)))
    assert exact.get_epsilon(1e-5) <= grouped <= 1.05 * exact.get_epsilon(1e-5)


def test_fifteen_thousand_rounds():
    account = Account(Gaussian(60 + number / 1000) for number in range(15_000))
    assert 0 < best_epsilon(account, 1e-5)[0] < 20


def test_what_has_no_guarantee_has_no_epsilon():
    assert Account([Gaussian(5.0), Unaccounted("because")]).epsilon(1e-5) == math.inf
    assert Account([Gaussian(0.0)]).delta(3.0) == 1.0
    assert Account().epsilon(1e-5) == 0.0 and Account().delta(0.5) == 0.0


def test_an_account_is_not_changed_by_asking_what_if():
    account = Account([Gaussian(1.0)])
    before = account.epsilon(1e-5)
    assert account.plus(Gaussian(1.0, Sampling("poisson", probability=0.5)), 7).epsilon(1e-5) > before
    assert account.epsilon(1e-5) == before


@pytest.mark.parametrize("sampling", [Sampling(), Sampling("poisson", probability=0.1)])
def test_calibration_is_tight_both_ways(sampling):
    multiplier = noise_multiplier_for(4.0, 1e-5, 50, sampling)

    def spent(z, rounds):
        return best_epsilon(Account().plus(Gaussian(z, sampling), rounds), 1e-5)[0]

    assert spent(multiplier, 50) <= 4.0 < spent(multiplier * 0.995, 50)
    assert rounds_for(multiplier, 4.0, 1e-5, sampling) >= 50
    rounds = rounds_for(2.0, 4.0, 1e-5, sampling)
    assert spent(2.0, rounds) <= 4.0 < spent(2.0, rounds + 1)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5])
def test_a_delta_that_is_none(delta):
    with pytest.raises(ConfigError, match="delta must be above 0 and below 1"):
        Account([Gaussian(1.0)]).epsilon(delta)
