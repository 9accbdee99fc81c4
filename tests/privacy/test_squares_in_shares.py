"""Lengths of updates, as a number in a sum of which no party sees a part, and the distance that follows from sums."""

import math
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
import pytest
from statistics_of_noise import is_normal, std_is
from support import failures
from test_bits_in_shares import PARTIES, update_of

from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.plan import Plan, add_share, encode_client_input
from cloister.privacy.mechanisms.distributed.shared import SharedSum
from cloister.privacy.mechanisms.distributed.shares import STEPS, Parties, Shares, Squares, variance_of
from cloister.privacy.mechanisms.metric import DistanceScaled
from cloister.utils.errors import ConfigError

Z_D = 0.5
TOLD = [5e-324, 1e-9, 0.1, 0.3, 1.0, 1.2345, 1.9999999, 2.0, 2.5, 1e300]


def scaled(kind=DistanceScaled, **options):
    return kind(**({"distance": "rms", "release": "private", "distance_multiplier": Z_D} | options))


def mechanism(scale=None, parties=PARTIES, z=1.0, clip=None):
    clip = clip or FixedClip(1.0)
    return DistributedMean(noise_multiplier=z, clip=clip, parties=parties, scale=scale or scaled())


@dataclass(frozen=True)
class Unclipped(Squares):
    """A broken twin: what is squared is the update before clipping."""

    def number(self, cohort, bound):
        return int(min(1e6, cohort.norms[0] / bound) ** 2 * self.steps) if np.isfinite(cohort.norms[0]) else 0


def farthest(squares, seed=0):
    """Return one client's largest effect on the sum, in steps, beside sending nothing."""
    rng, edges = np.random.default_rng(seed), [(1.0, 0.0), (np.nan, 0.0), (np.inf, 0.0), (3e38, 3e38), (1e-45, 0.0)]
    drawn = [rng.standard_normal(2) * 10.0 ** rng.integers(-30, 30) for _ in range(200)]
    return max(abs(squares.number(update_of(*update), 1.0)) for update in (*drawn, *edges))


def covers(squares, moved):
    """Return whether the noise in a sum of all members is z_d times one client's effect; two-sided."""
    noise, parties = np.zeros(60_000, np.int64), squares.shares.parties
    for client in range(parties.members):
        add_share(noise, squares.shares, f"squares {client}".encode().rjust(32), {})
    expected = Z_D * moved * math.sqrt(parties.members / parties.honest)
    return std_is(noise, expected) and is_normal(noise, expected)


class TestTheNumber:
    def test_is_the_squared_norm_after_clipping(self):
        def check(update, expected):
            found = Squares.of(Z_D, PARTIES).number(update_of(*(2 * part for part in update)), 2.0)
            assert found / STEPS == pytest.approx(expected, abs=2e-4) and found <= STEPS

        cases = [((0.3, 0.4), 0.25), ((1.0, 0.0), 1.0), ((3.0, 4.0), 1.0), ((0.0, 0.0), 0.0), ((1e-30, 0.0), 0.0)]
        assert failures(cases, check) == []

    def test_of_an_update_that_is_none_is_zero_as_the_update_is(self):
        def check(wrong):
            assert not encode_client_input(update_of(wrong, 1.0, 1.0), mechanism().plan(3)).any()

        assert failures([np.nan, np.inf, -np.inf, 3e38], check) == []

    def test_moves_by_no_more_than_is_charged(self):
        squares = Squares.of(Z_D, PARTIES)
        assert STEPS - 1 <= farthest(squares) <= squares.event().sensitivity
        assert farthest(Unclipped(squares.steps, squares.shares)) > squares.event().sensitivity

    @pytest.mark.slow
    def test_is_what_the_noise_is_for(self):
        squares = Squares.of(Z_D, PARTIES)
        assert covers(squares, farthest(squares))

    @pytest.mark.slow
    def test_twins_are_found(self):
        """Squares of what nobody has clipped; noise that only all members together would make enough of; none."""
        squares = Squares.of(Z_D, PARTIES)
        unclipped = Unclipped(squares.steps, squares.shares)
        assert not covers(unclipped, farthest(unclipped))
        shared_by_all = variance_of(Z_D, STEPS) * PARTIES.honest // PARTIES.members
        for variance in (shared_by_all, 0):
            twin = replace(squares, shares=Shares.of(variance, PARTIES, removable=False))
            assert not covers(twin, farthest(twin))


@dataclass(frozen=True, kw_only=True)
class Floorless(DistributedMean):
    """A broken twin: what is told scales the noise as it is."""

    def plan(self, parameters):
        factor = 1 / self.distance if self.scale.direction == "divide" else self.distance
        return Plan.of(1.0, self.multiplier * factor, self.parties, parameters, beside=(self.squares,))


def sound(mechanism, distances=TOLD, parameters=650):
    """Return whether no distance makes noise of less than the charge, in integers, or another event."""
    charged = mechanism.events(update_of(*[0.0] * parameters).layout)
    for distance in distances:
        told = replace(mechanism, distance=distance)
        plan = told.plan(parameters)
        least = charged[-1].honest * charged[-1].scale ** 2
        if plan.shares.variance < least or plan.beside[0].event() != charged[0]:
            return False
        if told.events(update_of(*[0.0] * parameters).layout) != charged:
            return False
    return True


class TestWhatNodesAreTold:
    def test_no_distance_makes_less_noise_than_is_charged(self):
        def check(parties, options, z):
            assert sound(mechanism(scaled(**options), parties, z))

        options = [{}, {"direction": "multiply"}, {"min_distance": 0.7, "max_distance": 1.2}, {"min_distance": 9.0}]
        assert failures(product([Parties(3, 2), PARTIES, Parties(100, 67, 33)], options, [1e-5, 1.0]), check) == []

    @pytest.mark.parametrize(("direction", "distance"), [("divide", 2.001), ("multiply", 0.0999)])
    def test_a_twin_that_does_not_hold_it_is_found(self, direction, distance):
        given = mechanism(scaled(direction=direction))
        twin = Floorless(noise_multiplier=1.0, clip=given.clip, parties=PARTIES, scale=given.scale)
        assert sound(given, [distance]) and not sound(twin, [distance])

    def test_the_least_is_met_and_more_distance_is_less_noise(self):
        plans = [replace(mechanism(), distance=distance).plan(650).shares.variance for distance in TOLD]
        assert plans == sorted(plans, reverse=True) and plans[0] > 300 * plans[-1]
        least = mechanism().events(LAYOUT)[-1]
        assert least.honest * least.scale**2 == pytest.approx(plans[-1], rel=1e-6)
        assert least.multiplier("add-or-remove", True) == pytest.approx(0.5, rel=1e-6)

    def test_ring_and_length_are_the_same_for_all(self):
        """They are agreed on before anybody is told a distance to go by."""
        for parties, z in product((PARTIES, Parties(100, 67, 33)), (1.0, 2.5)):
            plans = [replace(mechanism(parties=parties, z=z), distance=distance).plan(650) for distance in TOLD]
            assert len({(plan.bits, plan.length) for plan in plans}) == 1

    def test_what_is_no_distance_is_refused(self):
        def check(wrong):
            with pytest.raises(ConfigError, match="distance"):
                replace(mechanism(), distance=wrong)

        assert failures([0.0, -1.0, math.nan, math.inf], check) == []

    @pytest.mark.parametrize(
        "change",
        [{"scale": scaled(distance="l2")}, {"scale": scaled(release="exact")}],
        ids=["of pairs", "exact"],
    )
    def test_what_does_not_follow_from_sums_is_refused(self, change):
        with pytest.raises(ConfigError, match=r"of sums alone only privacy\.distance = 'rms' follows"):
            mechanism(**change)

    def test_a_clip_that_moves_is_refused(self):
        with pytest.raises(ConfigError, match="of sums alone"):
            mechanism(scaled(max_distance=1.0), clip=AdaptiveClip(1.0))


LAYOUT = update_of(*[0.0] * 650).layout


def sums(plan, cohorts, rounds):
    """Sums of many rounds of the same updates with fresh noise, without surplus, shape (rounds, p + 1)."""
    update, beside = np.zeros(rounds * plan.parameters, np.int64), np.zeros(rounds, np.int64)
    for client in range(len(cohorts)):
        add_share(update, replace(plan.shares, components=()), f"update {client}".encode().rjust(32), {})
        add_share(beside, plan.beside[0].shares, f"beside {client}".encode().rjust(32), {})
    return sum(encode_client_input(cohort, plan) for cohort in cohorts) + np.column_stack(
        [update.reshape(rounds, -1), beside]
    )


class TestTheDistance:
    def updates(self, clients=6, parameters=200, seed=0):
        rng = np.random.default_rng(seed)
        return [update_of(*rng.normal(0, 0.04, parameters)) for _ in range(clients)]

    def test_of_sums_without_noise_is_that_of_all_pairs(self):
        cohorts, one = self.updates(), mechanism(z=0.0)
        total = sum(encode_client_input(cohort, one.plan(200)) for cohort in cohorts)
        rows = [cohort.rows[0][0].astype(float) for cohort in cohorts]
        expected = math.sqrt(np.mean([np.sum((a - b) ** 2) for a, b in combinations(rows, 2)]))
        released = one.released(SharedSum(total, 6, 6), cohorts[0].sent, cohorts[0].layout, 1)
        assert released.released_distance == pytest.approx(expected, rel=2e-3)
        assert released.following.distance == released.released_distance

    @pytest.mark.slow
    def test_noise_does_not_shift_it(self):
        """Two-sided, of 400 sums: the mean of the squared distances is the exact one, to six of its deviations."""
        rounds, cohorts = 400, self.updates()
        one = mechanism(scaled(distance_multiplier=0.05), Parties(6, 6), z=0.5)
        plan, rows = one.plan(200), [cohort.rows[0][0].astype(float) for cohort in cohorts]
        exact = np.mean([np.sum((a - b) ** 2) for a, b in combinations(rows, 2)])
        totals, noise = sums(plan, cohorts, rounds), 200 * plan.shares.within(6, 6)

        def squared(taken):
            summed = (np.sum(totals[:, :-1].astype(float) ** 2, axis=1) - taken) / plan.steps**2
            return 2 * (6 * totals[:, -1] / STEPS - summed) / 30

        found = squared(noise)
        margin = 6 * found.std() / math.sqrt(rounds)
        assert abs(found.mean() - exact) < margin
        assert all(abs(squared(wrong * noise).mean() - exact) > margin for wrong in (0, 2))
        released = [
            one.released(SharedSum(total, 6, 6), cohorts[0].sent, cohorts[0].layout, 1).released_distance
            for total in totals
        ]
        np.testing.assert_allclose(released, np.sqrt(np.maximum(0, found)), rtol=1e-6, atol=1e-6)

    def test_surplus_that_was_not_shown_is_noise_as_well(self):
        shares = mechanism().plan(3).shares
        assert shares.within(6, 6) == 6 * shares.left(6)
        assert shares.within(5, 3) == 3 * shares.left(5) + 2 * shares.left(4)

    @pytest.mark.parametrize(("beside", "held"), [(-(10**6), 0.1), (2**31 - 1, 2.0)])
    def test_of_the_next_round_is_held(self, beside, held):
        cohort, one = update_of(0.0, 0.0), mechanism(z=0.0)
        following = one.released(SharedSum(np.array([0, 0, beside]), 6, 6), cohort.sent, cohort.layout, 1).following
        assert following.distance == held
        assert following.events(LAYOUT) == one.events(LAYOUT)
        assert one.restored(following.state_dict()) == following

    def test_the_first_round_has_the_multiplier_of_the_configuration(self):
        assert mechanism().factor == 1.0
        assert mechanism(scaled(max_distance=0.5)).factor == 2.0

    def test_the_noise_that_is_told_is_that_of_the_factor(self):
        cohort, one = update_of(0.0, 0.0), mechanism(scaled(max_distance=0.5), z=0.25)
        released = one.released(SharedSum(np.zeros(3, np.int64), 5, 5), cohort.sent, cohort.layout, 1)
        assert (released.noise_std, released.noise_multiplier) == (0.25 * 2.0 / 5, 0.25 * 2.0)
