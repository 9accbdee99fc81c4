"""The scale of a round's noise, by hand, and the worst cost of a round."""

import math
from fractions import Fraction

import numpy as np
import pytest
from private_strategies import LAYOUT, globally, metrically, privately
from support import failures, random_models
from test_clipping import cohort_of

from cloister import DiscreteGaussian
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.mechanisms.clipping import AdaptiveClip, clip
from cloister.privacy.mechanisms.gaussian import GaussianTrimmedMean
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.mechanism import NOTHING_SEEN, Contributions
from cloister.privacy.mechanisms.metric import CONSTANT, Distance, DistanceScaled, Scaling
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.errors import ConfigError, PrivacyError

LIMIT = 2 * 1.5 / math.sqrt(2)
"""Of the distance of two clients clipped to 1.5, for two arrays."""
RAW = cohort_of(random_models(3, 100.0))
BOUNDED = clip(RAW, 1.5)


def given(cohort=RAW, server_round=1, noise=None):
    return Contributions(cohort, (), len(cohort), len(cohort), noise or GaussianNoise(1), server_round)


def test_the_event_of_a_sum():
    assert globally(z=3.0).mechanism.events(LAYOUT) == (Gaussian(3.0),)
    for much in (1e9, 1e6):
        assert globally(z=much).mechanism.events(LAYOUT) == (Gaussian(1e6),)
    (joint,) = globally(z=3.0, bound=AdaptiveClip(1.0, bits_multiplier=4.0)).mechanism.events(LAYOUT)
    assert joint.noise_multiplier == pytest.approx(2.4)
    drawn = Sampling("poisson", 0.5)
    assert globally(z=3.0).mechanism.events(LAYOUT, drawn) == (Gaussian(3.0, drawn),)


def test_the_events_of_a_private_distance_and_the_sum_at_its_limit():
    def check(options, least):
        distance, total = privately(distance_multiplier=0.7, **options).mechanism.events(LAYOUT, UNSAMPLED)
        assert distance == Gaussian(0.7) and total.noise_multiplier == pytest.approx(least)

    cases = [
        ({}, 2.0 / LIMIT),
        ({"max_distance": 0.5}, 2.0 / 0.5),
        ({"max_distance": 0.5, "min_distance": 0.8}, 2.0 / 0.8),
        ({"min_distance": 9.0}, 2.0 / 9.0),
        ({"direction": "multiply"}, 2.0 * 0.1),
        ({"direction": "multiply", "min_distance": 0.3}, 2.0 * 0.3),
        ({"bound": AdaptiveClip(1.0, bits_multiplier=1e6), "max_distance": 0.5}, 2.0 / 0.5),
        ({"bound": AdaptiveClip(1.0, bits_multiplier=1e6), "max_distance": 0.5, "min_distance": 0.8}, 2.0 / 0.8),
    ]
    assert failures(cases, check) == []


@pytest.mark.parametrize(
    ("options", "distance", "expected"),
    [
        ({}, 0.5, 4.0),
        ({}, 0.01, 20.0),
        ({}, 100.0, 0.02),
        ({"max_distance": 3.0}, 100.0, 2 / 3),
        ({"min_distance": 0.25}, 0.01, 8.0),
        ({"direction": "multiply"}, 0.5, 1.0),
        ({"direction": "multiply"}, 0.01, 0.2),
        ({"direction": "multiply"}, 100.0, 200.0),
        ({"direction": "multiply", "max_distance": 3.0}, 100.0, 6.0),
        ({"min_distance": 0.0}, 1e-9, 2e9),
        ({"direction": "multiply", "min_distance": 0.0}, 0.0, 0.0),
        ({"release": "private"}, 100.0, 2 / LIMIT),
        ({"release": "private", "max_distance": 0.4}, 100.0, 5.0),
        ({"release": "private", "max_distance": 50.0}, 100.0, 2 / LIMIT),
        ({"release": "private", "min_distance": 7.0}, 100.0, 2 / 7.0),
    ],
)
def test_a_multiplier_by_hand(monkeypatch, options, distance, expected):
    monkeypatch.setattr(Distance, "of", lambda *_: distance)
    monkeypatch.setattr(Grid, "noised", lambda grid, whole, noise: whole * grid.step)
    mechanism = metrically(**options).mechanism
    scaling = mechanism.scale.of(given(), BOUNDED)
    assert 2.0 * scaling.factor == pytest.approx(expected)
    assert scaling.released == (pytest.approx(min(distance, LIMIT)) if "release" in options else None)
    assert mechanism.release(given()).noise_multiplier == pytest.approx(expected)


@pytest.mark.parametrize("direction", ["divide", "multiply"])
def test_a_private_distance_needs_a_minimum(direction):
    """It would have no least noise to be charged with under `multiply`."""
    with pytest.raises(ConfigError, match=r"min-distance = 0 needs privacy\.distance-release = 'exact'"):
        DistanceScaled(release="private", min_distance=0.0, direction=direction)


@pytest.mark.parametrize("distance", [0.0, 5e-324])
def test_noise_is_not_divided_by_nothing(monkeypatch, distance):
    monkeypatch.setattr(Distance, "of", lambda *_: distance)
    with pytest.raises(PrivacyError, match=r"privacy\.min-distance = 0, and .* set a minimum above 0"):
        metrically(min_distance=0.0).mechanism.release(given())


def test_a_distance_without_a_minimum_claims_nothing():
    assert metrically(min_distance=0.0).mechanism.caveats()


def test_the_noise_on_a_distance_by_hand():
    scale = DistanceScaled(release="private", distance_multiplier=0.7)
    grid = Grid.of(scale._limit(1.5, BOUNDED.layout), 0.7, 1)
    whole = math.ceil(0.4 / grid.bound * grid.steps) + int(DiscreteGaussian(2**24, GaussianNoise(5)).integers(1)[0])
    found = scale.noised(0.4, BOUNDED, GaussianNoise(5))
    assert type(found) is float and found == whole * grid.step and grid.bound == pytest.approx(LIMIT)


ODD = [0.0, -0.0, -1.0, 5e-324, 1e-30, 0.4, math.nextafter(LIMIT, 0), LIMIT, 1e300, math.inf, -math.inf, math.nan]
"""Distances that another package might compute."""


@pytest.mark.parametrize("z_d", [1e-6, 0.7, 3.0, 1e6, 1e9])
def test_no_distance_moves_it_by_more_steps_than_its_noise_is_for(monkeypatch, z_d):
    """In integers, from 0 to D, and up to the next step."""
    seen = []
    monkeypatch.setattr(Grid, "noised", lambda grid, whole, noise: seen.append((whole, grid)) or 0.0)
    scale = DistanceScaled(release="private", distance_multiplier=z_d)
    for distance in [*ODD, *np.random.default_rng(1).uniform(0, LIMIT, 100)]:
        scale.noised(distance, BOUNDED, GaussianNoise(1))
        whole, grid = seen[-1]
        assert type(whole) is int and 0 <= whole <= grid.steps
        if 0 <= distance <= grid.bound * (1 - 1 / grid.steps):
            assert -1e-9 * LIMIT <= whole * grid.step - distance <= grid.step * (1 + 1e-9)
    assert {whole for whole, _ in seen} >= {0, int(grid.steps)}
    assert grid.scale**2 >= (Fraction(z_d) * Fraction(grid.steps)) ** 2 + 25


def test_a_distance_that_is_rounded_past_its_limit_is_found_out(monkeypatch):
    """The broken twin of the last check: D is no whole number, and the next one is more."""
    seen = []
    monkeypatch.setattr(Grid, "noised", lambda grid, whole, noise: seen.append((whole, grid)) or 0.0)
    monkeypatch.setattr(Grid, "whole", lambda grid, share: math.ceil(share * grid.steps))
    DistanceScaled(release="private", distance_multiplier=0.7).noised(LIMIT, BOUNDED, GaussianNoise(1))
    ((whole, grid),) = seen
    assert whole > grid.steps


@pytest.mark.parametrize("measure", ["before", "after"])
def test_which_distance_is_measured(measure):
    scale = DistanceScaled(measure=measure)
    first, second, before = (scale.of(given(server_round=number), BOUNDED) for number in (1, 2, 0))
    distance = first.diagnostics.distance
    assert first.released is None and first.factor == pytest.approx(1 / distance)
    assert distance > 100 if measure == "before" else 0 < distance <= 2.13
    assert first.diagnostics.clip_calibration > 100
    assert second.diagnostics.clip_calibration is None is before.diagnostics.clip_calibration


def test_a_private_release_hints_at_no_clip():
    assert DistanceScaled(release="private").of(given(), BOUNDED).diagnostics.clip_calibration is None


def test_a_constant_scale_sees_nothing():
    assert CONSTANT.of(given(), BOUNDED) == Scaling(1.0, None, NOTHING_SEEN)
    assert CONSTANT.events() == CONSTANT.caveats() == () and CONSTANT.parameters() == {}
    assert CONSTANT.minimum(None, LAYOUT) == 1.0


def test_which_rounds_make_no_release():
    found = [make().mechanism.skips_empty_rounds for make in (metrically, privately, globally)]
    assert found == [True, False, False]


def test_a_rule_without_a_strategy_releases_nothing():
    lone = GaussianTrimmedMean(noise_multiplier=1.0, clip=globally().mechanism.clip)
    with pytest.raises(ConfigError) as refused:
        lone.release(given())
    assert str(refused.value) == "privacy.placement = 'rule' releases what a strategy stands for, and has none yet"


def test_canaries_would_decide_the_distance():
    with pytest.raises(ConfigError) as refused:
        DistanceScaled().refuse_canaries()
    assert str(refused.value) == (
        "privacy.canaries contradicts privacy.server = 'metric': canaries would decide the distance of clients, "
        "and with it the noise; use 'global-dp', or 0 canaries"
    )
