"""Distances: the paper's golden example, brute force, and digits that do not cancel."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failures, random_models, zeros
from test_clipping import cohort_of

from cloister.privacy.mechanisms import metric
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.metric import (
    DISTANCES,
    cosine,
    l2,
    largest_distance,
    layer_grams,
    mean_layer_frobenius,
)
from cloister.utils.errors import PluginError

GOLDEN = [
    {"kernel": np.array([[3, 4], [0, 0]], np.float32), "bias": np.array([1, 2, 0], np.float32)},
    {"kernel": np.array([[0, 0], [6, 8]], np.float32), "bias": np.array([2, 0, 2], np.float32)},
    {"kernel": np.array([[-3, 0], [0, 4]], np.float32), "bias": np.array([0, -1, 3], np.float32)},
]


def brute_force(name, models, sent):
    layers = list(sent)

    def pair(a, b):
        if name == "mean-layer-frobenius":
            return np.mean([np.linalg.norm(a[k].astype(float) - b[k].astype(float)) for k in layers])
        u, v = (np.concatenate([(m[k].astype(float) - sent[k].astype(float)).ravel() for k in layers]) for m in (a, b))
        if name == "l2":
            return np.linalg.norm(u - v)
        return 1 - u @ v / (np.linalg.norm(u) * np.linalg.norm(v))

    return max(pair(a, b) for i, a in enumerate(models) for b in models[:i])


def test_the_golden_example():
    matrix = mean_layer_frobenius(cohort_of(GOLDEN))
    np.testing.assert_allclose(
        [matrix[0, 1], matrix[0, 2], matrix[1, 2]], [7.0901699437, 6.3025551, 5.1298697], rtol=1e-7
    )
    assert largest_distance(cohort_of(GOLDEN), mean_layer_frobenius) == pytest.approx(7.0901699437, rel=1e-10)


@pytest.mark.parametrize("name", ["mean-layer-frobenius", "l2", "cosine"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(count=st.integers(2, 9), seed=st.integers(0, 999), width=st.integers(1, 3000))
def test_against_a_loop_over_pairs(name, count, seed, width):
    sent, *models = random_models(count + 1, 1.0, seed, zeros(width))
    found = largest_distance(cohort_of(models, sent), DISTANCES.load(name).pairwise)
    # The cohort subtracts in float32, as the models are; that is the whole difference.
    assert found == pytest.approx(brute_force(name, models, sent), rel=3e-6)


def test_the_root_mean_square_is_that_of_all_pairs():
    def check(count):
        models = random_models(count, like=zeros(30))
        rows = [np.concatenate([array.ravel() for array in model.values()]) for model in models]
        squares = [np.sum((one - other) ** 2) for number, one in enumerate(rows) for other in rows[:number]]
        found = DISTANCES.load("rms").of(cohort_of(models, zeros(30)))
        assert found == pytest.approx(math.sqrt(np.mean(squares)) if squares else 0.0, rel=3e-6)

    assert failures([0, 1, 2, 5], check) == []


@pytest.mark.parametrize("name", ["mean-layer-frobenius", "l2"])
def test_near_clients_lose_no_digits(name):
    """Updates of norm 1000 that differ by 1e-4: a plain Gram matrix would have no digit left."""
    base = random_models(1, 1000.0, like=zeros(2000))[0]
    models = [{k: v.astype(np.float64) + 1e-4 * i for k, v in base.items()} for i in range(4)]
    sent = {k: np.zeros_like(v, np.float64) for k, v in base.items()}
    found = largest_distance(cohort_of(models, sent), DISTANCES.load(name).pairwise)
    assert found == pytest.approx(brute_force(name, models, sent), rel=1e-9)


def test_the_distance_after_clipping_is_bounded_by_the_clip():
    models = [*random_models(3), {k: 1000 * np.ones_like(v) for k, v in zeros().items()}]
    raw = cohort_of(models)
    assert largest_distance(raw, l2) > 100
    assert largest_distance(clip(raw, 0.5), l2) <= 1.0
    assert largest_distance(clip(raw, 0.5), mean_layer_frobenius) <= 2 * 0.5 / np.sqrt(2) + 1e-9


def test_fewer_than_two_clients_are_no_distance_apart():
    def check(count, name):
        cohort = cohort_of(random_models(2)).take(np.arange(count))
        assert largest_distance(cohort, DISTANCES.load(name).pairwise) == 0.0

    assert failures(product([0, 1], ["mean-layer-frobenius", "l2", "cosine"]), check) == []


@pytest.mark.parametrize("name", ["mean-layer-frobenius", "l2"])
def test_equal_clients_are_no_distance_apart(name):
    assert largest_distance(cohort_of([GOLDEN[0]] * 3), DISTANCES.load(name).pairwise) == 0.0


def test_cosine_of_an_update_without_direction():
    matrix = cosine(cohort_of([zeros(), zeros(), *random_models(1)]))
    assert matrix[0, 1] == 0.0 and matrix[0, 2] == 1.0


def test_opposed_updates_are_two_apart():
    model = random_models(1)[0]
    opposed = {name: -array for name, array in model.items()}
    assert largest_distance(cohort_of([model, opposed]), cosine) == pytest.approx(2.0)


def test_nothing_is_further_apart_however_it_is_rounded():
    """2 is the bound that a released distance is noised for."""
    update = np.array([-0.18890165, -0.00464193, -0.03121946, 0.00803995], np.float32)
    opposed = -np.float32(1.9340197) * update  # found by a search: 1 - cos is above 2 by a bit
    assert largest_distance(cohort_of([{"kernel": update}, {"kernel": opposed}]), cosine) == 2.0


def test_nor_are_opposed_updates_whose_products_are_rounded_up(monkeypatch):
    """Round the products up, independently of this machine."""
    above = np.array([[1.0, -1.0 - 2**-40], [-1.0 - 2**-40, 1.0]])
    monkeypatch.setattr(metric, "total_gram", lambda cohort: above)
    assert cosine(cohort_of(random_models(2))).max() == 2.0


def test_nor_nearer_than_equal(monkeypatch):
    """Two updates of one direction whose product is rounded up are 0 apart, not less."""
    above = np.array([[1.0, 1.0 + 2**-40], [1.0 + 2**-40, 1.0]])
    monkeypatch.setattr(metric, "total_gram", lambda cohort: above)
    np.testing.assert_array_equal(cosine(cohort_of(random_models(2))), np.zeros((2, 2)))


def test_layer_grams_are_those_of_the_bounded_updates():
    clipped = clip(cohort_of(random_models(4, 10.0, like=zeros(500))), 1.0)
    rows = np.array([np.concatenate(row) for row in clipped.rows], np.float64) * clipped.factors[:, None]
    total = sum(layer_grams(clipped, centred=False))
    np.testing.assert_allclose(total, rows @ rows.T, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("widest", [1, 7, 256])
def test_arrays_of_several_blocks_count_once(monkeypatch, widest):
    """The distance of an array is a root of a sum over all of its blocks."""
    cohort = clip(cohort_of(random_models(4, 10.0, like=zeros(500))), 1.0)
    expected = [DISTANCES.load(name).pairwise(cohort) for name in ("mean-layer-frobenius", "l2", "cosine")]
    assert len(list(layer_grams(cohort))) == 2
    monkeypatch.setattr(metric, "WIDEST", widest)
    assert len(list(layer_grams(cohort))) == 2
    for name, matrix in zip(("mean-layer-frobenius", "l2", "cosine"), expected, strict=True):
        np.testing.assert_allclose(DISTANCES.load(name).pairwise(cohort), matrix, rtol=1e-9, atol=1e-12)


def test_an_unknown_distance_lists_the_known():
    with pytest.raises(PluginError, match=r"privacy\.distance = 'l3'; .*known: cosine, l2, mean-layer-frobenius, rms"):
        DISTANCES.load("l3")
