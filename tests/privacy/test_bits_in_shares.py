"""The bit that an adaptive clip follows, as a number in a sum of which nobody sees a part: what it says and costs."""

import math
import os
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from statistics_of_noise import is_normal, std_is
from support import failures
from test_clipping import cohort_of

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import DistributedGaussian, Gaussian
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.plan import (
    Plan,
    add_noise,
    add_share,
    encode_client_input,
    quantize_update,
)
from cloister.privacy.mechanisms.distributed.shared import SharedSum
from cloister.privacy.mechanisms.distributed.shares import LARGEST_MULTIPLIER, STEPS, Bits, Parties, Shares, variance_of
from cloister.utils.errors import PrivacyError

PARTIES = Parties(6, 4, 1)
COHORTS = [Parties(1, 1), Parties(3, 2), Parties(6, 4, 1), Parties(100, 67, 33), Parties(100, 100, 99)]
QUANTILES = [0.5, 0.3, 0.9, 1 / 3, 1e-9, 1 - 1e-9]


def bits_of(quantile=0.5, multiplier=10.0, parties=PARTIES, kind=Bits):
    return kind.of(AdaptiveClip(1.0, quantile=quantile, bits_multiplier=multiplier), parties)


def update_of(*numbers):
    """The cohort of one client, with an update of these numbers."""
    return cohort_of([{"kernel": np.array(numbers, np.float32)}], {"kernel": np.zeros(len(numbers), np.float32)})


def plan_with(bits, numbers=3, multiplier=1.0):
    return Plan.of(1.0, multiplier, bits.shares.parties, numbers, beside=(bits,))


class TestTheBit:
    def test_is_what_the_clip_sums(self):
        def check(update, share):
            bits = bits_of(0.3)
            assert bits.number(update_of(*update), 1.0) * bits.grid.step == pytest.approx(share, abs=2 / STEPS)

        cases = [((0.3, 0.0), 0.7), ((1.0, 0.0), 0.7), ((0.0, 1.001), -0.3), ((1e18, 1e18), -0.3), ((0.0, -0.0), 0.0)]
        assert failures(cases, check) == []

    def test_of_an_update_that_is_none_is_zero_as_the_update_is(self):
        def check(wrong):
            bits = bits_of()
            assert not encode_client_input(update_of(wrong, 1.0, 1.0), plan_with(bits)).any()

        assert failures([np.nan, np.inf, -np.inf, 3e38], check) == []

    def test_stands_behind_the_update(self):
        bits, cohort = bits_of(), update_of(0.1, 0.2, 0.3)
        plan = plan_with(bits)
        numbers = encode_client_input(cohort, plan)
        assert plan.length == len(numbers) == 4 and numbers[3] == STEPS
        np.testing.assert_array_equal(numbers[:3], quantize_update(cohort, plan))

    def test_goes_by_the_bound_of_the_round(self):
        plan, cohort = plan_with(bits_of()), update_of(3.0, 0.0, 0.0)
        assert [encode_client_input(cohort, plan.at(bound))[3] for bound in (2.9, 3.1)] == [-STEPS, STEPS]

    def test_the_mean_of_bits_is_the_share_within_the_clip_less_its_quantile(self):
        bits = bits_of(0.3)
        total = sum(bits.number(update_of(norm), 1.0) for norm in (0.2, 0.9, 1.0, 1.1, 5.0))
        assert bits.share(total, 5) == pytest.approx(3 / 5 - 0.3, abs=1e-4)


@dataclass(frozen=True)
class AlwaysThere(Bits):
    """A broken twin: an update of 0 counts as one within the clip, as where the server sees who has replied."""

    def number(self, cohort, bound):
        return super().number(cohort, bound) or super().number(update_of(bound / 2), bound)


def farthest(bits, seed=0):
    """Return one client's effect on the sum, in steps: of zeroing its update, and of sending another one."""
    rng, empty = np.random.default_rng(seed), bits.number(update_of(0.0, 0.0), 1.0)
    drawn = [rng.standard_normal(2) * 10.0 ** rng.integers(-30, 30) for _ in range(200)]
    edges = [(1.0, 0.0), (np.nextafter(np.float32(1), 2), 0.0), (np.nan, 0.0), (np.inf, 0.0), (1e-45, 0.0), (0.0, 0.0)]
    found = [bits.number(update_of(*update), 1.0) for update in (*drawn, *edges)]
    return max(abs(number - empty) for number in found), max(found) - min(found)


def covers(bits, moved, seed=1):
    """Return whether the noise in a sum of all members is z_b times one client's effect; two-sided."""
    noise, parties = np.zeros(60_000, np.int64), bits.shares.parties
    for client in range(parties.members):
        add_share(noise, bits.shares, f"{seed} {client}".encode().rjust(32), {})
    expected = 10.0 * moved * math.sqrt(parties.members / parties.honest)
    return std_is(noise, expected) and is_normal(noise, expected)


class TestWhatOneClientMoves:
    def test_is_no_more_than_is_charged(self):
        def check(quantile):
            bits = bits_of(quantile)
            zeroed, replaced = farthest(bits)
            assert zeroed <= bits.event().sensitivity and replaced <= 2 * bits.event().sensitivity
            assert zeroed >= bits.event().sensitivity - 1, "the search comes as far as there is"

        assert failures(QUANTILES, check) == []

    def test_is_what_the_noise_is_for(self):
        bits = bits_of()
        assert covers(bits, farthest(bits)[0])

    def test_in_all_parts_of_the_sum_is_one_release_of_the_joint_multiplier(self):
        """In units of their noise: at most 1/z_joint, and a long update moves them by all of it."""
        z, z_b, rng, found = 2.0, 3.0, np.random.default_rng(2), 0.0
        plan = plan_with(bits_of(multiplier=z_b), multiplier=z)
        joint = AdaptiveClip(1.0, bits_multiplier=z_b).joint_multiplier(z)
        for scale in [0.1, 1.0, 10.0, 1e3] * 10:
            *update, bit = encode_client_input(update_of(*scale * rng.standard_normal(3)), plan).astype(float)
            moved = math.hypot(np.linalg.norm(update) / (z * plan.steps), bit / (z_b * STEPS))
            assert moved <= 1 / joint * (1 + 1e-12)
            found = max(found, moved)
        assert found > 0.999 / joint

    def test_a_twin_that_counts_who_sends_nothing_is_found_by_both(self):
        """Zeroing an update beyond the clip then turns its bit, by twice as much as the noise is for."""
        twin = bits_of(kind=AlwaysThere)
        zeroed, _ = farthest(twin)
        assert zeroed == 2 * twin.event().sensitivity and not covers(twin, zeroed)

    def test_a_twin_with_noise_for_all_members_is_found(self):
        variance = variance_of(10.0, STEPS) * PARTIES.honest // PARTIES.members
        twin = replace(bits_of(), shares=Shares.of(variance, PARTIES, removable=False))
        assert not covers(twin, farthest(twin)[0])


class TestItsNoise:
    def test_in_integers_no_sum_holds_less_than_is_charged(self):
        def check(parties, multiplier):
            bits = bits_of(multiplier=multiplier, parties=parties)
            needed = (Fraction(multiplier) * STEPS) ** 2 + 25
            honest = [(left - parties.colluding) * bits.shares.left(left) for left in parties.survivors()]
            assert min(honest) >= needed
            event = bits.event()
            assert event.honest * Fraction(event.scale) ** 2 <= min(honest)
            assert event.multiplier("add-or-remove", False) >= multiplier * (1 - 1e-6)
            assert plan_with(bits).bits == 32, "the narrow ring has room for it"

        assert failures(product(COHORTS, (1e-6, 0.1, 10.0, LARGEST_MULTIPLIER)), check) == []

    def test_more_cannot_be_made(self):
        with pytest.raises(PrivacyError, match="a share of the noise would have"):
            bits_of(multiplier=600.0, parties=Parties(1, 1))

    def test_each_part_has_a_secret_of_its_own(self):
        """By hand: noise of one key on two grids would be one number twice."""
        plan, drawn = plan_with(bits_of(), multiplier=2.0), []

        def draw(size):
            drawn.append(os.urandom(size))
            return drawn[-1]

        numbers, seeds = np.zeros(4, np.int64), {5: b"a".rjust(32), 6: b"b".rjust(32)}
        add_noise(numbers, plan, draw, seeds)
        expected = np.zeros(4, np.int64)
        assert len(set(drawn)) == 2 and {len(one) for one in drawn} == {32}
        add_share(expected[:3], plan.shares, drawn[0], seeds)
        add_share(expected[3:], plan.beside[0].shares, drawn[1], {})
        np.testing.assert_array_equal(numbers, expected)
        assert numbers.all()


class TestThePlan:
    def test_releases_bits_and_then_updates(self):
        plan = plan_with(bits_of(multiplier=3.0), multiplier=2.0)
        bits, update = plan.events()
        assert (bits.parameters, bits.sensitivity, update) == (1, STEPS, plan.event())
        joint = AdaptiveClip(1.0, bits_multiplier=3.0).joint_multiplier(2.0)
        together = Account([bits, update]).epsilon(1e-5, "rdp")
        assert together == pytest.approx(Account([Gaussian(joint)]).epsilon(1e-5, "rdp"), rel=1e-3)

    def test_neither_noise_nor_price_depends_on_the_bound(self):
        """Another C changes the size of a step and nothing in steps: the server asks for no less noise."""
        plan = plan_with(bits_of())
        for bound in (1e-12, 0.5, 1e30):
            other = plan.at(bound)
            assert replace(other, bound=plan.bound) == plan and other.events() == plan.events()
            assert other.terms() != plan.terms()
            numbers = encode_client_input(update_of(0.3, -2.0, 5.0), other)
            assert sum(int(k) ** 2 for k in numbers[:3]) <= plan.steps**2 and abs(numbers[3]) <= STEPS

    def test_its_terms_hold_the_bits(self):
        others = [bits_of(0.3), bits_of(multiplier=9.0), bits_of()]
        assert len({plan_with(bits).terms() for bits in others}) == 3
        assert plan_with(bits_of()).terms() == plan_with(bits_of()).terms()

    def test_bits_without_room_are_refused(self):
        bits = bits_of(multiplier=255.0, parties=Parties(100, 51, 50))
        wide = replace(bits, shares=replace(bits.shares, parties=Parties(2000, 51, 50)))
        with pytest.raises(PrivacyError, match="has no room in 32 bits"):
            replace(plan_with(bits), beside=(wide,))


class TestTheMechanism:
    def mechanism(self, clip):
        return DistributedMean(noise_multiplier=1.0, clip=clip, parties=PARTIES)

    def test_a_fixed_clip_has_none(self):
        fixed = self.mechanism(FixedClip(0.7))
        assert fixed.bits is None and fixed.plan(3).length == 3 and len(fixed.plan(3).events()) == 1

    def test_its_clip_follows_what_was_released_and_its_price_stays(self):
        cohort = update_of(1.0, 2.0, 3.0)
        mechanism = self.mechanism(AdaptiveClip(0.7, quantile=0.25, rate=1.0))
        plan = mechanism.plan(3)
        total = np.array([0, 0, 0, 4 * plan.beside[0].number(cohort, 0.7)])
        following = mechanism.released(SharedSum(total, 4, 4), cohort.sent, cohort.layout, 1).following
        # Nobody is within the clip: the share is 0, and γ below its quantile, to a step of the grid.
        assert following.clip.bound == pytest.approx(0.7 * math.exp(0.25), rel=1e-4)
        assert following.clip.initial == 0.7
        assert following.events(cohort.layout) == mechanism.events(cohort.layout)
        assert all(isinstance(event, DistributedGaussian) for event in following.events(cohort.layout))

    @pytest.mark.parametrize("total", [-(2**31), 2**31 - 1])
    def test_no_client_takes_it_further_than_the_rule(self, total):
        cohort, clip = update_of(1.0), AdaptiveClip(0.7, quantile=0.25, rate=1.0)
        following = (
            self.mechanism(clip)
            .released(SharedSum(np.array([0, total]), 4, 4), cohort.sent, cohort.layout, 1)
            .following
        )
        assert following.clip.bound == pytest.approx(0.7 * math.exp(0.25 if total < 0 else -0.75))
