"""Noise in shares: what is left of it for every number of survivors, and the whole numbers that it is added to."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from statistics_of_noise import std_is
from support import failures, random_models, zeros
from test_clipping import cohort_of

from cloister import DiscreteGaussian
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.distributed.plan import Plan, add_share, quantize_update, without_surplus
from cloister.privacy.mechanisms.distributed.shares import Parties, Shares
from cloister.utils.errors import ConfigError, PrivacyError

STEPS = 2**20
COHORTS = [
    Parties(1, 1),
    Parties(3, 2),
    Parties(3, 3, 1),
    Parties(6, 4, 1),
    Parties(20, 14, 3),
    Parties(100, 67, 33),
    Parties(41, 40),
]
VARIANCES = [1, 25 + 2**32, 25 + 2**40, 3 * 10**14 + 7]


def each_sum(shares):
    """The number of survivors, and the variance of the honest noise in their sum."""
    for survivors in shares.parties.survivors():
        yield survivors, (survivors - shares.parties.colluding) * shares.left(survivors)


class TestShares:
    def test_in_integers_no_sum_ever_holds_less_than_is_charged(self):
        def check(parties, variance, removable):
            shares = Shares.of(variance, parties, removable)
            left = dict(each_sum(shares))
            assert shares.variance == min(left.values()) >= variance
            assert all(256 <= scale < 2**25 for scale in (shares.base, *shares.scales().values()))

        assert failures(product(COHORTS, VARIANCES, (True, False)), check) == []

    def test_and_hardly_more_where_surplus_is_taken_off(self):
        def check(parties, variance):
            shares = Shares.of(variance, parties)
            assert all(left <= 1.001 * variance for _, left in each_sum(shares))
            kept = dict(each_sum(Shares.of(variance, parties, removable=False)))
            everyone = variance * (parties.members - parties.colluding) / parties.honest
            assert kept[parties.members] == pytest.approx(everyone, rel=1e-3)

        assert failures(product(COHORTS, VARIANCES[2:]), check) == []

    def test_components_are_those_of_the_paper(self):
        parties, variance = Parties(20, 14, 3), 2**40
        shares = Shares.of(variance, parties)
        assert shares.base == math.isqrt(variance // 17) + 1 and list(shares.scales()) == list(range(15, 21))
        for number, scale in shares.scales().items():
            assert scale**2 == pytest.approx(variance / (number - 4) - variance / (number - 3), rel=1e-3)

    def test_a_twin_without_one_component_holds_less(self):
        """The check by integers sees one component that is not there, and one that is taken off too early."""
        shares = Shares.of(2**40, Parties(6, 4, 1))
        for number in shares.scales():
            at = number - 5
            twin = replace(shares, components=(*shares.components[:at], 0, *shares.components[at + 1 :]))
            assert twin.variance < 2**40

    def test_what_is_made_too_large_is_not_made_up_for_twice(self):
        """Noise of less than 2^8 steps is not made; a component that is not needed then is left out."""
        shares = Shares.of(25 + 10_486**2, Parties(100, 67, 33))
        assert min(shares.scales().values()) >= 256 and 0 in shares.components
        assert all(left <= 1.1 * (25 + 10_486**2) for _, left in each_sum(shares))
        assert shares.smallest >= 256 and shares.terms < 34 * 34

    def test_the_most_members_of_a_sum(self):
        assert Shares.of(2**40, Parties(6, 4, 1)).terms == 9  # 3·3, 4·2, 5·1
        assert Shares.of(2**40, Parties(6, 4, 1), removable=False).terms == 5
        assert Shares.of(2**40, Parties(6, 2, 1)).terms == 9  # 1·5, 2·4, 3·3, 4·2, 5·1

    def test_without_noise(self):
        shares = Shares.of(0, Parties(6, 4, 1))
        assert shares.base == shares.variance == shares.smallest == 0 and not shares.scales()

    def test_a_share_that_cannot_be_made_is_refused(self):
        assert Shares.of((2**25 - 1) ** 2, Parties(2, 1), removable=False).base == 2**25 - 1
        with pytest.raises(PrivacyError, match="33554432 steps; at most 33554431 can be made"):
            Shares.of(2**50, Parties(2, 1), removable=False)

    def test_parties_that_cannot_be_are_refused(self):
        def check(counts):
            with pytest.raises(PrivacyError, match="colluding must be at least 0, threshold above it"):
                Parties(*counts)

        assert failures(zip([(3, 4, 0), (3, 0, 0), (3, 2, 2), (3, 2, -1)]), check) == []

    @pytest.mark.parametrize("survivors", [3, 7])
    def test_survivors_that_cannot_be_are_refused(self, survivors):
        with pytest.raises(PrivacyError, match=f"survivors must be from 4 to 6, found {survivors}"):
            Shares.of(2**40, Parties(6, 4, 1)).left(survivors)


class TestThePlan:
    def test_its_event_is_the_central_gaussian_or_a_little_less(self):
        def check(parties, multiplier):
            plan = Plan.of(0.7, multiplier, parties, 1_206_590)
            event = plan.event()
            assert plan.shares.variance >= (Fraction(multiplier) * plan.steps) ** 2 + 25
            z = event.multiplier("add-or-remove", False)
            assert z >= multiplier * (1 - 1e-6) and event.honest == parties.honest and event.sensitivity == plan.steps
            assert event.honest * event.components >= plan.shares.terms and event.smallest == plan.shares.smallest
            if multiplier >= 0.5:
                found, central = (Account().plus(each, 10) for each in (event, Gaussian(multiplier)))
                assert found.mu_squared() == pytest.approx(central.mu_squared(), rel=1e-3)

        assert failures(product(COHORTS, [1e-6, 0.01, 0.5, 1.0, 8.0]), check) == []

    def test_the_event_of_the_worst_number_of_survivors_is_charged(self):
        plan = Plan.of(1.0, 1.0, Parties(20, 14, 3), 100)
        event = plan.event()
        assert event.honest * event.scale**2 <= min(left for _, left in each_sum(plan.shares))
        assert event.honest * event.scale**2 == pytest.approx(plan.shares.variance, rel=1e-9)

    def test_without_noise_nothing_is_claimed(self):
        plan = Plan.of(1.0, 0.0, Parties(6, 4, 1), 100)
        assert isinstance(plan.event(), Unaccounted) and Account([plan.event()]).epsilon(1e-5) == math.inf

    def test_the_grid_is_as_fine_as_truncation_asks_for(self):
        def check(parameters, steps):
            plan = Plan.of(1.0, 1.0, Parties(6, 4, 1), parameters)
            assert plan.steps == 2**steps and math.sqrt(parameters / 3) / plan.steps <= 1e-3

        assert failures([(1, 20), (3_298_534, 20), (3_298_535, 21), (25_000_000, 22)], check) == []

    def test_a_grid_that_cannot_be_fine_enough_is_refused(self):
        with pytest.raises(PrivacyError, match="20000000000 parameters are more than"):
            Plan.of(1.0, 1.0, Parties(6, 4, 1), 2 * 10**10)

    def test_the_room_of_the_ring_to_the_last_member(self):
        """n·D + 10·√(n·V) < 2^31, at the largest n; one more is refused, and has room in 64 bits."""

        def reach(shares):
            members = shares.parties.members
            most = members * shares.left(shares.parties.threshold)
            return members * STEPS + 10 * math.sqrt(most)

        def plan(members, bits=32):
            return Plan.of(1.0, 2.0, Parties(members, 1900), 100, bits)

        largest = max(members for members in range(1960, 2048) if reach(plan(members, 64).shares) < 2**31)
        assert plan(largest).bits == 32
        with pytest.raises(PrivacyError, match=f"a sum of {largest + 1} updates of 1048576 steps .* in 32 bits"):
            plan(largest + 1)

    def test_the_room_is_for_the_noise_before_anything_is_taken_off(self):
        """Shares with all of their components decide: √(1000/501) times what is left when everybody survives."""
        parties = Parties(1000, 501)
        assert Plan.of(1.0, 73.0, parties, 100).bits == 32
        with pytest.raises(PrivacyError, match="has no room in 32 bits; take 64 bits"):
            Plan.of(1.0, 76.0, parties, 100)

    def test_its_terms_differ_wherever_plans_do(self):
        plan = Plan.of(0.1, 1.0, Parties(6, 4, 1), 100)
        others = [
            replace(plan, bound=math.nextafter(0.1, 1)),
            replace(plan, steps=2**21),
            replace(plan, bits=64),
            replace(plan, parameters=101),
            replace(plan, shares=replace(plan.shares, base=plan.shares.base + 1)),
            replace(plan, shares=replace(plan.shares, components=plan.shares.components[::-1])),
            replace(plan, shares=replace(plan.shares, parties=Parties(6, 4, 0))),
        ]
        assert len({each.terms() for each in [plan, *others]}) == 8
        assert plan.terms() == Plan.of(0.1, 1.0, Parties(6, 4, 1), 100).terms() and json.loads(plan.terms())

    def test_what_is_out_of_range_is_refused(self):
        def check(given):
            bound, multiplier, parameters, bits = given
            with pytest.raises(ConfigError):
                Plan.of(bound, multiplier, Parties(6, 4, 1), parameters, bits)

        cases = zip(
            [(0.0, 1.0, 100, 32), (1.0, -1.0, 100, 32), (1.0, math.nan, 100, 32), (1.0, 1.0, 0, 32), (1.0, 1.0, 1, 16)]
        )
        assert failures(cases, check) == []


def plan_for(cohort, bound=1.0):
    return Plan.of(bound, 1.0, Parties(6, 4, 1), cohort.layout.size)


@pytest.mark.usefixtures("poisoned_memory")
class TestWholeUpdates:
    def test_an_update_by_hand(self):
        def check(width, scale):
            sent, model = random_models(2, scale, like=zeros(width))
            cohort = cohort_of([model], sent)
            plan = plan_for(cohort)
            (factor,) = clip(cohort, 1.0).factors
            weight = np.float32(factor / (1.0 / STEPS))
            expected = [np.trunc((row - base) * weight) for row, base in zip(*cohort.rows, cohort.sent)]
            found = quantize_update(cohort, plan)
            assert found.dtype == np.int64
            np.testing.assert_array_equal(found, np.concatenate(expected))
            assert sum(int(k) ** 2 for k in found) <= STEPS**2

        assert failures(product([3, 70_000], [1e-4, 1.0, 1e3]), check) == []

    def test_an_update_that_is_none_counts_as_zero(self):
        def check(wrong):
            (model,) = random_models(1)
            model["kernel"][1, 1] = wrong
            cohort = cohort_of([model])
            assert not quantize_update(cohort, plan_for(cohort)).any()

        assert failures([np.nan, np.inf, -np.inf, 3e38], check) == []

    def test_a_whole_cohort_is_no_update(self):
        cohort = cohort_of(random_models(2))
        with pytest.raises(PrivacyError, match="one update of 15 numbers, found 2 of 15"):
            quantize_update(cohort, plan_for(cohort))
        one = cohort_of(random_models(1))
        with pytest.raises(PrivacyError, match="one update of 16 numbers, found 1 of 15"):
            quantize_update(one, replace(plan_for(one), parameters=16))


NUMBERS = 60_000
PARTIES = Parties(6, 4, 1)
SHARES = Shares.of(25 + 2**40, PARTIES)
"""Of these the noise of every sum is looked at, and of twins that lack some of it."""


def secret(*place):
    return repr(place).encode().rjust(32)


def seeds_of(client, up_to=PARTIES.members):
    return {number: secret(client, number) for number in range(PARTIES.threshold + 1, up_to + 1)}


def summed(clients, shares=SHARES, numbers=NUMBERS):
    total = np.zeros(numbers, np.int64)
    for client in clients:
        add_share(total, shares, secret(client, "base"), seeds_of(client))
    return total


def deviation(survivors, clients=None):
    return math.sqrt((clients or survivors) * (25 + 2**40) / (survivors - 1))


class TestTheNoiseOfASum:
    def test_it_is_as_large_as_charged_for_every_number_of_survivors(self):
        """All shares, and those of the honest alone, whose noise is what counts: σ whoever is left."""

        def check(survivors):
            for clients in (survivors, survivors - 1):
                noise = summed(range(clients))
                left = without_surplus(noise, SHARES, survivors, [seeds_of(c, survivors) for c in range(clients)])
                expected = deviation(survivors, clients)
                assert (
                    std_is(left, expected) and not std_is(left, expected * 0.95) and not std_is(left, expected * 1.05)
                )
                assert survivors == 4 or not std_is(noise, expected), "there was surplus"
            assert std_is(left, 2**20)

        assert failures(PARTIES.survivors(), check) == []

    def test_before_anything_is_taken_off_it_is_what_the_ring_has_room_for(self):
        assert std_is(summed(range(6)), math.sqrt(6 * SHARES.left(4)))

    @pytest.mark.parametrize("number", [5, 6])
    def test_a_component_that_nobody_adds_shows(self, number):
        at = number - 5
        twin = replace(SHARES, components=(*SHARES.components[:at], 0, *SHARES.components[at + 1 :]))
        left = summed(range(4), twin)
        assert not std_is(left, deviation(4)) and left.std() < deviation(4)

    def test_the_wrong_prefix_shows(self):
        """The surplus of six survivors is subtracted from a sum of five."""
        left = summed(range(5)) - summed_components(range(5), 6)
        assert not std_is(left, deviation(5)) and left.std() < deviation(5)

    def test_surplus_that_is_taken_off_twice_shows(self):
        seeds = [seeds_of(c, 6) for c in range(6)]
        once = without_surplus(summed(range(6)), SHARES, 6, seeds)
        assert std_is(once, deviation(6)) and not std_is(without_surplus(once, SHARES, 6, seeds), deviation(6))

    def test_surplus_of_who_shows_nothing_stays(self):
        noise = summed(range(6))
        left = without_surplus(noise, SHARES, 6, [seeds_of(c, 6) for c in range(5)])
        expected = summed(range(6)) - summed_components(range(5), 6)
        np.testing.assert_array_equal(left, expected)
        assert left.std() > deviation(6)


def summed_components(clients, up_to, numbers=NUMBERS):
    """Components alone, by the sampler itself."""
    found = np.zeros(numbers, np.int64)
    for client in clients:
        for number in range(5, up_to + 1):
            found += DiscreteGaussian(SHARES.scales()[number], secret(client, number)).integers(numbers)
    return found


class TestSharesInIntegers:
    def test_a_share_is_its_base_and_its_components(self):
        base = DiscreteGaussian(SHARES.base, secret(0, "base")).integers(300).astype(np.int64)
        np.testing.assert_array_equal(summed([0], numbers=300), base + summed_components([0], 6, 300))

    def test_what_is_taken_off_is_what_was_added(self):
        def check(survivors):
            total = summed(range(survivors), numbers=300)
            kept = total.copy()
            left = without_surplus(total, SHARES, survivors, [seeds_of(c, survivors) for c in range(survivors)])
            np.testing.assert_array_equal(left, total - summed_components(range(survivors), survivors, 300))
            np.testing.assert_array_equal(total, kept)

        assert failures(PARTIES.survivors(), check) == []

    def test_without_noise_nothing_is_added(self):
        shares = Shares.of(0, PARTIES)
        assert not summed(range(3), shares, 100).any()

    def test_without_components_no_seeds_are_taken(self):
        shares = Shares.of(2**40, PARTIES, removable=False)
        numbers = np.zeros(100, np.int64)
        add_share(numbers, shares, secret(0, "base"), {})
        assert numbers.any()
        np.testing.assert_array_equal(without_surplus(numbers, shares, 6, [{}] * 6), numbers)
        with pytest.raises(PrivacyError, match=r"no component is to be made here, found seeds for \[5\]"):
            without_surplus(numbers, shares, 6, [{5: bytes(32)}])

    def test_seeds_of_another_prefix_are_refused(self):
        def check(survivors, seeds, says):
            total = np.zeros(10, np.int64)
            with pytest.raises(PrivacyError, match=says):
                without_surplus(total, SHARES, survivors, seeds)

        cases = [
            (5, [seeds_of(0, 6)], r"components 5 to 5, found \[5, 6\]"),
            (6, [seeds_of(0, 5)], r"components 5 to 6, found \[5\]"),
            (4, [seeds_of(0, 5)], r"no component is to be made here, found seeds for \[5\]"),
            (3, [], "survivors must be from 4 to 6, found 3"),
            (5, [seeds_of(c, 5) for c in range(6)], "6 clients show seeds, of 5 survivors"),
        ]
        assert failures(cases, check) == []

    def test_a_share_without_all_its_components_is_refused(self):
        numbers = np.zeros(10, np.int64)
        with pytest.raises(PrivacyError, match="components 5 to 6"):
            add_share(numbers, SHARES, bytes(32), seeds_of(0, 5))
        assert not numbers.any()


class TestSecrets:
    def test_a_secret_makes_the_same_noise_everywhere_and_is_no_seed(self):
        one, same, other = (DiscreteGaussian(300, each) for each in (bytes(32), bytes(32), bytes(31) + b"1"))
        numbers = one.integers(1000)
        np.testing.assert_array_equal(numbers, same.integers(1000))
        assert (numbers != other.integers(1000)).mean() > 0.9
        assert not one.seeded and DiscreteGaussian(300, 0).seeded

    def test_a_short_secret_is_refused(self):
        with pytest.raises(PrivacyError, match="at least 16 bytes, found 15"):
            DiscreteGaussian(300, bytes(15))
