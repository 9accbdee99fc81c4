"""Cost of noise in shares: golden numbers, the law of a sum by brute force, and the central Gaussian beside it."""

import json
import math
import os
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support import failures

from cloister.privacy.accounting import distributed
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import DistributedGaussian, Gaussian, from_json, to_json
from cloister.privacy.accounting.filters import GaussianFilter, RenyiFilter
from cloister.privacy.mechanisms.discrete.sampler import SMOOTHING
from cloister.utils.errors import PrivacyError

STEPS = 2**20
ORDERS = (1.5, 2.0, 8.0, 64.0)
RELATIONS = ("add-or-remove", "replace-one")


def golden():
    path = Path(os.environ.get("CLOISTER_DATA", "")) / "golden" / "distributed-discrete-gaussian.json"
    if not os.environ.get("CLOISTER_DATA") or not path.is_file():
        pytest.skip("CLOISTER_DATA does not name a folder with golden/")
    return json.loads(path.read_text())["rows"]


def curve_of(row):
    tau = math.exp(distributed.log_tau(row["clients"], row["local-std"]))
    variance = row["clients"] * row["local-std"] ** 2
    return distributed.distributed_curve(tuple(row["orders"]), row["l2"], variance, tau, row["parameters"])


class TestGoldenNumbers:
    def test_divergences(self):
        for row in golden():
            found = row["rounds"] * curve_of(row)
            np.testing.assert_allclose(found, row["rdp"], rtol=1e-6, err_msg=str(row["clients"]))

    def test_tau(self):
        for row in golden():
            assert math.exp(distributed.log_tau(row["clients"], row["local-std"])) == pytest.approx(
                row["tau"], rel=1e-9
            )

    def test_they_see_another_number_of_clients(self):
        """A bound that counts one client too many is told from the right one."""
        (row,) = [row for row in golden() if row["clients"] == 20]
        assert curve_of({**row, "clients": 21})[0] != pytest.approx(row["rdp"][0] / row["rounds"], rel=1e-3)

    def test_two_of_them_without_the_file(self):
        def check(clients, std, parameters, l2, expected):
            row = {"clients": clients, "local-std": std, "parameters": parameters, "l2": l2, "orders": [2]}
            assert curve_of(row)[0] == pytest.approx(expected, rel=1e-12)

        assert failures([(3, 0.5, 10, 4.0, 33.53970680519885), (3, 1.0, 1000, 16.0, 85.49221332972535)], check) == []


REACH = 40


def law(scale):
    """The discrete Gaussian on -REACH … REACH."""
    weights = np.exp(-(np.arange(-REACH, REACH + 1) ** 2) / (2 * scale**2))
    return weights / weights.sum()


def law_of_sum(scales):
    found = law(scales[0])
    for scale in scales[1:]:
        found = np.convolve(found, law(scale), mode="same")
    return found


class TestTheLawOfASum:
    @pytest.mark.parametrize("scales", [(0.5, 0.5), (0.6, 0.6, 0.6), (0.7, 0.5, 1.1), (1.0, 0.8, 0.9, 1.2)])
    def test_it_is_within_tau_of_a_discrete_gaussian(self, scales):
        middle = slice(REACH - 4, REACH + 5)
        deviation = math.sqrt(sum(scale**2 for scale in scales))
        off = np.abs(np.log(law_of_sum(scales)[middle] / law(deviation)[middle])).max()
        tau = math.exp(distributed.log_tau(len(scales), min(scales)))
        assert 1e-9 < off <= tau

    def test_one_member_is_the_law_itself(self):
        assert distributed.log_tau(1, 0.5) == -math.inf

    def test_a_release_tells_no_more_than_its_curve_says(self):
        scales, moved = (0.8,) * 4, 2
        noise = law_of_sum(scales)
        # Beyond 16 steps, five deviations of one and nearly six of the other, is nothing that shows.
        left, right = (noise[REACH + start - 16 : REACH + start + 17] for start in (moved, 0))
        tau = math.exp(distributed.log_tau(4, 0.8))
        for order in (1.5, 2.0, 4.0):
            exact = math.log(np.sum(left**order * right ** (1 - order))) / (order - 1)
            (bound,) = distributed.distributed_curve((order,), moved, 4 * 0.8**2, tau, 1)
            assert 0.9 * bound < exact <= bound

    def test_many_members_count_for_at_least_what_they_are(self):
        """τ is a sum of as many terms as there are members; late ones are counted together, and for no less."""

        def check(scale):
            many = distributed.ONE_BY_ONE + 500
            terms = [-2 * (math.pi * scale) ** 2 * k / (k + 1) for k in range(1, many)]
            top = max(terms)
            exact = math.log(10) + top + math.log(math.fsum(math.exp(term - top) for term in terms))
            assert exact <= distributed.log_tau(many, scale) + 1e-9 <= exact + 1e-3 * abs(exact)
            assert distributed.log_tau(many, scale) < distributed.log_tau(many + 1, scale) + 1e-9

        assert failures([0.5, 3.0, 300.0], check) == []

    def test_each_of_the_three_bounds_is_the_least_somewhere(self):
        def bounds(sensitivity, tau, parameters):
            manhattan = min(math.sqrt(parameters) * sensitivity, sensitivity**2)
            return [
                sensitivity**2 + tau * parameters,
                sensitivity**2 + 2 * manhattan * tau + tau**2 * parameters,
                (sensitivity + math.sqrt(parameters) * tau) ** 2,
            ]

        least = set()
        for given in ((1.0, 0.5, 10), (1.0, 0.01, 100), (30.0, 0.01, 100)):
            expected = bounds(*given)
            assert distributed.distributed_curve((2.0,), given[0], 1.0, *given[1:])[0] == pytest.approx(min(expected))
            least.add(expected.index(min(expected)))
        assert least >= {0, 1}
        # The third is never above the second where the L1 distance is √p·Δ; there they are the same.
        assert bounds(30.0, 0.01, 100)[2] == pytest.approx(bounds(30.0, 0.01, 100)[1])


def shared(multiplier, honest, **other):
    """Shares that have the deviation z·D together."""
    return DistributedGaussian(honest, STEPS, multiplier * STEPS / math.sqrt(honest), 1_206_590, **other)


class TestPrices:
    def test_as_the_central_gaussian_to_a_thousandth(self):
        def check(accountant, relation, shares):
            multiplier, honest, rounds = shares
            event = shared(multiplier, honest, components=7, smallest=2**10)
            found, central = (
                Account(relation=relation).plus(each, rounds).epsilon(1e-5, accountant)
                for each in (event, Gaussian(multiplier))
            )
            assert central * (1 - 1e-9) <= found <= 1.001 * central

        of_shares = ((0.5, 2, 1), (1.0, 12, 100), (4.0, 67, 10))
        assert failures(product(("rdp", "pld", "published"), RELATIONS, of_shares), check) == []

    def test_every_price_by_itself(self):
        def check(relation):
            event, units = shared(2.0, 10), {"add-or-remove": 1, "replace-one": 2}[relation]
            z = event.multiplier(relation, False)
            assert z == event.multiplier(relation, True) == pytest.approx(2.0, rel=1e-9) and z < 2
            np.testing.assert_allclose(event.renyi(ORDERS, relation), units**2 * np.array(ORDERS) / 8, rtol=1e-12)
            assert event.mu_squared(relation) == units**2 / z**2
            assert event.pure(relation) == event.leakage == math.inf and event.has_losses(relation)
            step = 1e-3
            expected = Gaussian(z).losses(relation, step).get_epsilon_for_delta(1e-5)
            assert event.losses(relation, step).get_epsilon_for_delta(1e-5) == expected

        assert failures(RELATIONS, check) == []

    def test_the_smoothing_of_exact_noise_is_taken_off(self):
        assert distributed.SMOOTHED == SMOOTHING**2
        assert distributed.smoothed_multiplier(Fraction(125), 10.0) == math.nextafter(1.0, 0)
        event = DistributedGaussian(5, 10.0, 20.0, 3)
        assert event.multiplier("add-or-remove", False) == pytest.approx(math.sqrt(2000 - 25) / 10, rel=1e-12)

    def test_a_replacement_moves_the_sum_twice_as_far(self):
        event = shared(1.0, 12)
        assert event.replaced() == replace(event, sensitivity=2 * STEPS)
        assert Account([event], "replace-one").epsilon(1e-5) == pytest.approx(Account([event.replaced()]).epsilon(1e-5))
        np.testing.assert_allclose(event.renyi(ORDERS, "replace-one"), event.replaced().renyi(ORDERS, "add-or-remove"))

    def test_without_its_own_share_a_client_is_covered_by_one_less(self):
        event = shared(1.0, 5)
        assert event.alone() == replace(event, honest=4)
        assert event.alone().multiplier("add-or-remove", False) == pytest.approx(math.sqrt(4 / 5), rel=1e-9)
        with pytest.raises(PrivacyError, match="honest"):
            shared(1.0, 1).alone()

    def test_filters_count_it(self):
        account = Account().plus(shared(1.0, 12), 3)
        assert GaussianFilter().spent(account) == pytest.approx(3.0, rel=1e-9)
        assert RenyiFilter(8.0).spent(account) == pytest.approx(12.0, rel=1e-9)

    def test_in_words_and_as_an_object(self):
        event = shared(1.0, 12, components=7, smallest=2048)
        assert str(event) == "distributed gaussian, 12 shares, z = 1"
        assert from_json(json.loads(json.dumps(to_json(event)))) == event
        assert to_json(event)["kind"] == "distributed-gaussian"


COUNTS = "honest, parameters and components must be whole numbers from 1 to 1000000000"
LENGTHS = "sensitivity and scale must be above 0 and at most 2^53 steps, and smallest at most scale"
TOLD_APART = " over 100 parameters could be told from a discrete Gaussian; take a finer grid"
NO_MULTIPLIER = " must be a multiplier between 1e-06 and 1e+06"


def made(**fields):
    return DistributedGaussian(**{"honest": 12, "sensitivity": STEPS, "scale": 2.0**18, "parameters": 100, **fields})


class TestRefusals:
    def test_what_is_out_of_range_is_named(self):
        cases = [
            ({"honest": 0}, COUNTS),
            ({"honest": True}, COUNTS),
            ({"honest": 3.0}, COUNTS),
            ({"parameters": 10**9 + 1}, COUNTS),
            ({"components": 0}, COUNTS),
            ({"scale": "1"}, "sensitivity, scale and smallest must be numbers"),
            ({"sensitivity": True}, "sensitivity, scale and smallest must be numbers"),
            ({"sensitivity": 0.0}, LENGTHS),
            ({"sensitivity": 10**400}, LENGTHS),
            ({"scale": 0.0}, LENGTHS),
            ({"scale": math.nan}, LENGTHS),
            ({"scale": math.inf}, LENGTHS),
            ({"smallest": math.nan}, LENGTHS),
            ({"smallest": 2.0**19}, LENGTHS),
            ({"smallest": 0.4}, f"shares of noise of 0.4 steps are too small: the sum of 12{TOLD_APART}"),
            ({"smallest": -1.0}, f"shares of noise of -1 steps are too small: the sum of 12{TOLD_APART}"),
            ({"smallest": 2.0}, f"shares of noise of 2 steps are too small: the sum of 12{TOLD_APART}"),
            ({"scale": 1.0}, f"shares of noise of 1 steps are too small: the sum of 12{TOLD_APART}"),
            (
                {"honest": 2, "components": 2, "smallest": 1.0},
                f"shares of noise of 1 steps are too small: the sum of 4{TOLD_APART}",
            ),
            (
                {"honest": 1, "scale": 5.0, "sensitivity": 1.0},
                f"the noise of 1 shares of 5 steps for a sensitivity of 1{NO_MULTIPLIER}",
            ),
            (
                {"honest": 1, "scale": 30.0, "sensitivity": 2.0**53},
                f"the noise of 1 shares of 30 steps for a sensitivity of 9.0072e+15{NO_MULTIPLIER}",
            ),
            (
                {"honest": 1, "scale": 1.5e6, "sensitivity": 1.0},
                f"the noise of 1 shares of 1.5e+06 steps for a sensitivity of 1{NO_MULTIPLIER}",
            ),
        ]

        def check(fields, says):
            with pytest.raises(PrivacyError) as refused:
                made(**fields)
            assert str(refused.value) == says

        assert failures(cases, check) == []

    def test_the_ends_of_each_range_are_taken(self):
        def check(fields):
            assert 1e-6 <= made(**fields).multiplier("add-or-remove", False) <= 1e6

        cases = [
            {"honest": 10**9},
            {"parameters": 10**9},
            {"components": 10**9},
            {"honest": 1, "parameters": 1},
            {"sensitivity": 2.0**53, "scale": 2.0**53},
            {"sensitivity": 0.5, "scale": 1000.0},
            {"scale": 2.0**20, "smallest": 2.0**20},
            {"honest": 1, "sensitivity": 1.0, "scale": 10.0, "smallest": 0.5},
            {"honest": 1, "sensitivity": 1.0, "scale": 1e6},
        ]
        assert failures(cases, check) == []

    def test_tau_must_vanish_for_all_parameters_together(self):
        """The least scale that is taken lies where 2·10·exp(-π²s²)·p passes 2^-700."""
        edge = math.sqrt((math.log(10) + 700 * math.log(2) + math.log(1000)) / math.pi**2)
        assert distributed.is_negligible(2, 1.0001 * edge, 1000)
        assert not distributed.is_negligible(2, 0.9999 * edge, 1000)
        assert not distributed.is_negligible(2, 1.0001 * edge, 2000)
        assert distributed.is_negligible(1, 0.5, 10**9), "a share alone is the law itself"
