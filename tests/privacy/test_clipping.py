"""The clip bounds the true norm, exactly, and breaks nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_models, zeros

from cloister.core.arrays import Layout
from cloister.core.cohort import Cohort
from cloister.core.errors import ConfigError
from cloister.privacy.mechanisms.clipping import clip, clipped_fraction
from cloister.privacy.mechanisms.release import bounded_models


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


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(ConfigError, match="clipping_norm must be > 0"):
        clip(cohort_of([zeros()]), bound)
