"""The clip bounds the true norm, exactly, and breaks nothing else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failures, random_models, zeros

from cloister.privacy.mechanisms.clipping import (
    MAX_BOUND,
    MAX_RATE,
    MIN_BOUND,
    AdaptiveClip,
    FixedClip,
    capped_weights,
    clip,
    clipped_fraction,
)
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.release import bounded_models
from cloister.utils.arrays import Layout
from cloister.utils.cohort import NORM_ERROR, Cohort
from cloister.utils.errors import ConfigError


def cohort_of(models, sent=None):
    sent = sent or {name: np.zeros_like(array) for name, array in models[0].items()}
    layout = Layout.of(sent)
    return Cohort.of(layout, layout.rows(sent), tuple(layout.rows(model) for model in models))


def true_norms(cohort):
    sent = np.concatenate(cohort.sent).astype(np.float64)
    return np.array(
        [
            factor * np.linalg.norm(np.concatenate(row).astype(np.float64) - sent)
            for row, factor in zip(cohort.rows, cohort.factors)
        ]
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scale=st.floats(1e-6, 1e6), bound=st.floats(1e-3, 1e3), seed=st.integers(0, 999), width=st.integers(1, 4000))
def test_no_contribution_exceeds_the_bound(scale, bound, seed, width):
    clipped = clip(cohort_of(random_models(3, scale, seed, zeros(width))), bound)
    assert clipped.l2_bound == bound
    assert (true_norms(clipped) <= bound).all()


def test_an_update_inside_the_ball_is_untouched():
    cohort = cohort_of(random_models(4, 1e-3))
    assert (clip(cohort, 1.0).factors == 1).all()


def test_an_update_outside_is_scaled_onto_the_sphere():
    clipped = clip(cohort_of(random_models(4, 100.0)), 2.0)
    np.testing.assert_allclose(true_norms(clipped), 2.0, rtol=1e-4)
    assert clipped_fraction(clipped) == 1.0


def test_the_update_is_clipped_not_the_model():
    sent = random_models(1, 1000.0, seed=1)[0]
    near = {name: array + np.float32(1e-3) for name, array in sent.items()}
    assert (clip(cohort_of([near], sent), 1.0).factors == 1).all()


def test_one_norm_covers_all_arrays():
    model = {"kernel": np.full((6, 2), 3.0, np.float32), "bias": np.full(3, 4.0, np.float32)}
    expected = 1.0 / np.sqrt(12 * 9 + 3 * 16)
    np.testing.assert_allclose(clip(cohort_of([model]), 1.0).factors, expected, rtol=1e-4)


def test_a_zero_update_keeps_its_factor():
    assert clip(cohort_of([zeros()]), 1.0).factors.tolist() == [1.0]


def test_bounded_models_are_what_the_factors_say():
    models = random_models(3, 50.0)
    clipped = clip(cohort_of(models), 1.0)
    for row, original, factor in zip(bounded_models(clipped), clipped.rows, clipped.factors):
        np.testing.assert_allclose(np.concatenate(row), factor * np.concatenate(original), rtol=1e-5)


def test_a_bound_that_is_none_is_refused():
    def check(bound):
        with pytest.raises(ConfigError, match="clipping_norm must be > 0"):
            clip(cohort_of([zeros()]), bound)

    assert failures([0.0, -1.0, float("nan"), float("inf")], check) == []


def test_factors_by_hand():
    clipped = clip(cohort_of([{"a": np.array([3.0, 4.0])}, {"a": np.array([0.3, 0.4])}]), 2.0)
    np.testing.assert_allclose(clipped.factors, [2.0 / (5.0 * (1 + NORM_ERROR)), 1.0], rtol=1e-12)
    assert clipped.l2_bound == 2.0 and clipped_fraction(clipped) == 0.5
    assert clipped_fraction(clipped.take(np.arange(0))) == 0.0


def test_the_smallest_bound():
    assert clip(cohort_of([zeros()]), 1e-12).l2_bound == MIN_BOUND == 1e-12
    with pytest.raises(ConfigError) as refused:
        clip(cohort_of([zeros()]), 9e-13)
    assert str(refused.value) == "clipping_norm must be at least 1e-12, got 9e-13"


def test_capped_weights_by_hand():
    bounded = clip(cohort_of([{"a": np.array([3.0, 4.0])}] * 3), 2.0)
    capped = capped_weights(bounded, (1.0, 5.0, 9.0), 5.0)
    np.testing.assert_allclose(capped.factors, bounded.factors * [0.2, 1.0, 1.0])
    assert capped.l2_bound == 2.0
    with pytest.raises(ConfigError, match="examples_cap must be > 0, got 0"):
        capped_weights(bounded, (1.0, 1.0, 1.0), 0.0)


def test_what_a_clip_says_it_was_made_with():
    fixed, adaptive = FixedClip(2.0), AdaptiveClip(3.0)
    assert fixed.parameters() == {"privacy.clipping": "fixed", "privacy.clipping-norm": 2.0}
    for each in (adaptive, dataclasses.replace(adaptive, bound=9.0, initial=3.0)):
        assert each.parameters() == {
            "privacy.clipping": "adaptive",
            "privacy.clipping-norm": 3.0,
            "privacy.clipping-quantile": 0.5,
            "privacy.clipping-rate": 0.2,
            "privacy.clipping-count-noise-multiplier": 10.0,
        }
    assert fixed.joint_multiplier(0.7) == 0.7
    assert AdaptiveClip(1.0, bits_multiplier=4.0).joint_multiplier(3.0) == pytest.approx(2.4)
    assert AdaptiveClip(1.0).joint_multiplier(0.0) == 0.0


def test_a_fixed_clip_follows_nothing():
    fixed = FixedClip(2.0)
    assert fixed.followed(cohort_of([zeros()]), 1, GaussianNoise(1)) is fixed
    for each in (fixed, AdaptiveClip(1.0)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            each.bound = 9.0


def test_what_is_said_of_a_clip_that_is_none():
    def check(options, says):
        with pytest.raises(ConfigError) as refused:
            AdaptiveClip(**{"bound": 1.0} | options)
        assert str(refused.value) == says
        if "bound" in options:
            with pytest.raises(ConfigError, match="clipping_norm must be > 0"):
                FixedClip(0.0)

    cases = [
        ({"quantile": 0.0}, "clipping_quantile must be above 0 and below 1, got 0.0"),
        ({"quantile": 1.0}, "clipping_quantile must be above 0 and below 1, got 1.0"),
        ({"rate": 0.0}, "clipping_rate must be > 0, got 0.0"),
        ({"rate": 10.1}, "clipping_rate must be <= 10, got 10.1"),
        ({"bits_multiplier": 0.0}, "clipping_count_noise_multiplier must be > 0, got 0.0"),
        ({"bound": 0.0}, "clipping_norm must be > 0, got 0.0"),
    ]
    assert failures(cases, check) == []


@pytest.mark.parametrize(
    ("norms", "noise", "size", "share"),
    [
        ([0.5, 1.0, 2.0, 3.0], 0.0, 4, 0.5),
        ([0.5, 1.0, 2.0, 3.0], 0.0, 8, 0.25),
        ([2.0, 3.0], 0.0, 4, -0.15),
        ([0.5], 100.0, 4, 0.7),
        ([0.5], -100.0, 4, -0.3),
    ],
)
def test_a_step_of_the_bound_by_hand(monkeypatch, norms, noise, size, share):
    """γ = 0.3: the excess is the number within the bound less 0.3 for each reply; a step is held within [-γ, 1 - γ]."""
    asked = []

    def noised(grid, whole, source):
        asked.append((grid.scale * grid.step, source))
        return whole * grid.step + noise

    monkeypatch.setattr(Grid, "noised", noised)
    moving = AdaptiveClip(1.0, quantile=0.3, rate=0.7, bits_multiplier=3.0)
    moved = moving.followed(cohort_of([{"a": np.array([norm])} for norm in norms]), size, "source")
    assert asked == [(pytest.approx(3.0 * 0.7), "source")]
    within = sum(norm <= 1 for norm in norms) - 0.3 * len(norms)
    expected = min(0.7, max(-0.3, (within + noise) / size))
    assert moved.bound == pytest.approx(np.exp(-0.7 * expected))
    assert moved == dataclasses.replace(moving, bound=moved.bound, initial=1.0)
    if noise:
        assert expected == share


def test_a_bound_does_not_fall_below_the_smallest():
    falling, still = AdaptiveClip(2 * MIN_BOUND, rate=MAX_RATE), cohort_of([{"a": np.array([0.0])}] * 1000)
    assert falling.followed(still, 1000, GaussianNoise(1)).bound == MIN_BOUND


def test_a_bound_does_not_rise_above_the_largest():
    def check(bound):
        rising, apart = AdaptiveClip(bound, rate=MAX_RATE), cohort_of([{"a": np.array([1e100])}] * 1000)
        assert rising.followed(apart, 1000, GaussianNoise(1)).bound == MAX_BOUND

    assert failures([MAX_BOUND / 2, MAX_BOUND, 1e40], check) == []


def test_in_a_round_a_bound_moves_by_the_rate_at_most():
    moving = AdaptiveClip(1.0, quantile=0.999, rate=MAX_RATE, bits_multiplier=1e9)
    one = cohort_of([{"a": np.array([0.0])}])
    bounds = [moving.followed(one, 1, GaussianNoise(seed)).bound for seed in range(20)]
    assert all(np.exp(-MAX_RATE) < found < np.exp(MAX_RATE) for found in bounds) and len(set(bounds)) > 1


def test_an_adaptive_bound_goes_on_from_where_it_was_saved():
    moved = dataclasses.replace(AdaptiveClip(3.0, quantile=0.3), bound=9.0, initial=3.0)
    state = moved.state_dict()
    assert {name: array.tolist() for name, array in state.items()} == {"bound": 9.0, "initial": 3.0}
    restored = AdaptiveClip(3.0, quantile=0.3).restored(state)
    assert restored == moved and type(restored.bound) is type(restored.initial) is float


def test_canaries_would_drive_an_adaptive_bound():
    with pytest.raises(ConfigError) as refused:
        AdaptiveClip(1.0).refuse_canaries()
    assert str(refused.value) == (
        "privacy.canaries contradicts privacy.clipping = 'adaptive': canaries are longer than the clip, and would "
        "drive the quantile that it follows; use 'fixed', or 0 canaries"
    )
