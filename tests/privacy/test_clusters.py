"""k-means from the hypotheses: scikit-learn's clusters, in as many dimensions as a model has."""

import tracemalloc

import numpy as np
import pytest
from sklearn.cluster import KMeans
from support import failures

from cloister.server import clustering
from cloister.server.clustering import TOGETHER, clustered, lloyd, scattered
from cloister.utils.arrays import Layout


def rows_of(points):
    """Points of R^p as models of two arrays."""
    cut = points.shape[1] // 3
    models = [{"a": point[:cut], "b": point[cut:]} for point in points]
    layout = Layout.of(models[0])
    return layout, [layout.rows(model) for model in models]


def groups(count, dimensions, clusters, seed=0, noise=1.5, dtype=np.float32, off=1.5):
    """Points in overlapping groups, and hypotheses some way `off` from their centres."""
    rng = np.random.default_rng(seed)
    centres = 3 / np.sqrt(dimensions) * rng.standard_normal((clusters, dimensions)) + 5
    points = centres[rng.integers(clusters, size=count)] + noise * rng.standard_normal((count, dimensions)) / np.sqrt(
        dimensions
    )
    return points.astype(dtype), (centres + off / np.sqrt(dimensions) * rng.standard_normal(centres.shape)).astype(
        dtype
    )


def assigned(points, hypotheses):
    layout, rows = rows_of(np.concatenate([points, hypotheses]))
    return clustered(layout, rows[: len(points)], rows[len(points) :])


def scikit(points, hypotheses):
    """tol = 0: scikit-learn stops by default when centres have moved little, not when they stand."""
    return KMeans(len(hypotheses), init=hypotheses.astype(float), n_init=1, tol=0).fit(points.astype(float)).labels_


def test_the_clusters_are_those_of_scikit_learn():
    def check(count, dimensions, clusters, seed):
        points, hypotheses = groups(count, dimensions, clusters, seed)
        expected = scikit(points, hypotheses)
        assert len(np.unique(expected)) == clusters
        np.testing.assert_array_equal(assigned(points, hypotheses).labels, expected)

    sizes = [(60, 11, 3), (40, 40, 4), (30, 500, 3), (50, 2000, 5), (9, 6, 1)]
    assert failures([(*size, seed) for size in sizes for seed in range(5)], check) == []


def test_centres_have_to_move_for_that():
    """The nearest hypothesis is another assignment than k-means', or the test above would show little."""
    points, hypotheses = groups(60, 4, 3, seed=1, noise=3.0)
    nearest = np.linalg.norm(points[:, None] - hypotheses[None], axis=2).argmin(axis=1)
    assert (nearest != assigned(points, hypotheses).labels).any()


def test_the_gram_form_reproduces_distances_where_clients_nearly_agree():
    """Weights of 5 and clients 1e-4 apart: without centring, float64 squares of norms lose half of their digits."""
    points, hypotheses = groups(30, 3000, 2, noise=0.5, dtype=np.float64)
    middle = hypotheses.mean(axis=0)
    near, starts = middle + 1e-6 * (points - middle), middle + 1e-6 * (hypotheses - middle)
    found = assigned(near, starts)
    np.testing.assert_array_equal(found.labels, scikit(points, hypotheses))
    centres = np.array([near[found.labels == number].mean(axis=0) for number in range(2)])
    assert found.gaps[0, 1] == pytest.approx(np.linalg.norm(centres[0] - centres[1]), rel=1e-6)
    assert found.spread == pytest.approx(np.sqrt(np.square(near - centres[found.labels]).sum(axis=1).mean()), rel=1e-6)


@pytest.mark.parametrize("dimensions", [3, 300])
def test_an_empty_cluster_keeps_its_hypothesis(dimensions):
    points, hypotheses = groups(20, dimensions, 2, noise=0.1)
    far = np.concatenate([hypotheses, hypotheses[:1] + 1000])
    found = assigned(points, far)
    assert found.sizes[2] == 0 and sum(found.sizes) == 20
    middle = points[found.labels == 0].astype(float).mean(axis=0)
    assert found.gaps[0, 2] == pytest.approx(np.linalg.norm(far[2] - middle), rel=1e-6)


def test_a_cluster_of_everybody_has_their_mean_for_a_middle():
    """For any cluster, also if the first assignment is final."""

    def check(chosen):
        points = np.array([[1, 0, 0], [3, 0, 0], [2, 3, 0]], np.float32)
        hypotheses = np.array([[100, 0, 0], [0, 100, 0], [0, 0, 100]], np.float32)
        hypotheses[chosen] = [9, 9, 9]
        found = assigned(points, hypotheses)
        assert found.labels.tolist() == [chosen] * 3
        assert found.spread == pytest.approx(np.sqrt(8 / 3))
        middles = hypotheses.astype(float)
        middles[chosen] = [2, 1, 0]
        np.testing.assert_allclose(found.gaps, np.linalg.norm(middles[:, None] - middles[None], axis=2))

    assert failures([0, 1, 2], check) == []


def test_fewer_replies_than_hypotheses():
    points, hypotheses = groups(2, 50, 5)
    assert sum(assigned(points, hypotheses).sizes) == 2 and len(assigned(points, hypotheses).sizes) == 5


def test_no_replies():
    _, hypotheses = groups(2, 50, 3)
    found = assigned(np.zeros((0, 50), np.float32), hypotheses)
    assert found.sizes == (0, 0, 0) and found.spread == 0 and found.collapsed == ()


def test_of_equal_hypotheses_the_first_takes_all_and_the_collapse_is_told():
    points = np.array([[1, 0, 0], [-1, 0, 0], [0, 2, 0], [0, -2, 0]], np.float32)
    found = assigned(points, np.zeros((3, 3), np.float32))
    assert found.sizes == (4, 0, 0) and found.collapsed == ((0, 1), (0, 2), (1, 2))


@pytest.mark.parametrize(("gap", "collapsed"), [(0.5, ((0, 1),)), (2.0, ())])
def test_hypotheses_are_told_apart_by_the_clients_scatter(gap, collapsed):
    """Two clusters of two clients each, one unit to both sides of their middle, and the middles some way apart."""
    across = gap * TOGETHER
    points = np.array([[0, 1], [0, -1], [across, 1], [across, -1]], float)
    layout, rows = rows_of(np.concatenate([points, np.zeros((4, 1))], axis=1))
    starts = rows_of(np.array([[-across / 2, 0, 0], [1.5 * across, 0, 0]]))[1]
    found = clustered(layout, rows, starts)
    assert found.sizes == (2, 2) and found.spread == pytest.approx(1)
    assert found.collapsed == collapsed


def test_the_search_ends():
    labels = lloyd(np.zeros((5, 2)), np.zeros((3, 2)))
    assert (labels == 0).all()


def scattered_among(points, count):
    return scattered(*rows_of(points), count)


@pytest.mark.parametrize("dimensions", [3, 300])
def test_a_start_has_a_model_of_every_group(dimensions):
    """Groups of 90, 5 and 5: models chosen with equal probabilities would all be of the large one in most draws."""
    centres = np.eye(3, dimensions, dtype=np.float32) * 20 + 1000
    belongs = np.repeat([0, 1, 2], [90, 5, 5])
    noise = np.random.default_rng(0).standard_normal((100, dimensions)).astype(np.float32) / dimensions**0.5
    chosen = scattered_among(centres[belongs] + noise, 3)
    assert sorted(belongs[chosen]) == [0, 1, 2]


@pytest.mark.parametrize("dimensions", [3, 300])
def test_a_start_among_fewer_models_than_hypotheses_is_all_that_differ(dimensions):
    points = np.random.default_rng(4).standard_normal((2, dimensions)).astype(np.float32)[[0, 0, 1, 0, 1]]
    chosen = scattered_among(points, 5)
    assert len(chosen) == 2 and len(np.unique(points[chosen], axis=0)) == 2


def test_a_start_is_the_same_for_the_same_models():
    points, _ = groups(60, 11, 3)
    assert scattered_among(points, 4) == scattered_among(points.copy(), 4)


@pytest.mark.filterwarnings("error")
def test_a_start_is_the_same_in_any_unit_of_length():
    points, _ = groups(60, 11, 3, dtype=np.float64)
    assert scattered_among(points * 1e200, 4) == scattered_among(points, 4) == scattered_among(points * 1e-200, 4)


def test_of_several_draws_of_a_start_the_tightest_counts(monkeypatch):
    def spread(seed):
        points, _ = groups(60, 11, 5, seed, dtype=np.float64)
        centres = points[scattered_among(points, 5)]
        return np.square(points - centres[lloyd(points, centres)]).sum()

    several = [spread(seed) for seed in range(5)]
    monkeypatch.setattr(clustering, "DRAWS", 1)
    one = [spread(seed) for seed in range(5)]
    assert all(np.array(several) <= one) and sum(several) < 0.99 * sum(one)


@pytest.mark.slow
def test_a_million_parameters_and_a_hundred_clients_in_little_memory():
    rng, size = np.random.default_rng(0), 1_000_000
    centres = 5 + rng.standard_normal((3, size), np.float32)
    belongs = rng.integers(3, size=100)
    models = [(centres[number] + rng.standard_normal(size, np.float32),) for number in belongs]
    hypotheses = [(centre + np.float32(0.3) * rng.standard_normal(size, np.float32),) for centre in centres]
    layout = Layout.of({"a": centres[0]})
    tracemalloc.start()
    try:
        found = clustered(layout, models, hypotheses)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found.labels, belongs)
    assert peak < 64e6, f"{peak / 1e6:.0f} MB beside 412 MB of models"
