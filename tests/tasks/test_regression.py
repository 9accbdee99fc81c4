"""Regression: models, the base class, partitions, and Keras on the same loss."""

import numpy as np
import pytest
from support import failures
from test_tasks import task

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.datasets.regressions import OPTIMA, SAMPLES, USERS
from cloister.tasks.numpy_models import HiddenLayerRegression, LinearRegression
from cloister.tasks.partition import deal
from cloister.training.plan import TrainingPlan
from cloister.training.trainers import NumpyTrainer
from cloister.utils.errors import ConfigError, DataError, FederationError

SGD = Recipe(1, 8, 0.1)

MODELS = [LinearRegression(3), HiddenLayerRegression(3, 2), HiddenLayerRegression(3, 7)]


def examples(n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3)).astype(np.float32)
    return Examples(x, (x @ [1.0, -2.0, 0.5] + 3).astype(np.float32))


# Models


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_mean_squared_error(model):
    """Central differences in double precision, of a formula that is not the model's own code."""
    model.initialise(1)
    data = examples()
    loss, gradients = model.loss_and_gradients(data.x, data.y)
    assert loss == pytest.approx(float(np.square(model.predict(data.x) - data.y).mean()), rel=1e-5)
    weights = {name: array.astype(np.float64) for name, array in model.weights.items()}
    for name, array in weights.items():
        assert gradients[name].shape == array.shape and gradients[name].dtype == np.float32
        for index in np.ndindex(array.shape):
            slopes = [_loss(_moved(weights, name, index, step), data) for step in (1e-5, -1e-5)]
            assert gradients[name][index] == pytest.approx((slopes[0] - slopes[1]) / 2e-5, rel=1e-3, abs=1e-4)


def _moved(weights, name, index, step):
    moved = {key: array.copy() for key, array in weights.items()}
    moved[name][index] += step
    return moved


def _loss(weights, data):
    if "linear/kernel" in weights:
        predicted = data.x @ weights["linear/kernel"]
    else:
        hidden = data.x @ weights["hidden/kernel"] + weights["hidden/bias"]
        predicted = hidden.clip(0) @ weights["output/kernel"] + weights["output/bias"]
    return np.square(predicted - data.y).mean()


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_initialised_by_seed_read_and_replaced(model, tmp_path):
    model.initialise(1)
    first = model.arrays()
    model.initialise(2)
    assert any(not np.array_equal(first[name], array) for name, array in model.arrays().items())
    model.initialise(1)
    assert all(np.array_equal(first[name], array) for name, array in model.arrays().items())
    model.assign({name: np.zeros_like(array) for name, array in first.items()})
    assert not model.predict(examples().x).any() and any(array.any() for array in first.values())
    with pytest.raises(FederationError, match="must have shape"):
        model.assign({name: array[..., None] for name, array in first.items()})
    model.save(tmp_path / "model.npz")
    assert set(np.load(tmp_path / "model.npz")) == set(first)


def test_sizes_are_those_of_the_paper():
    assert sum(array.size for array in task("linear").build().arrays().values()) == 2
    assert sum(array.size for array in task("hospital-charges").build().arrays().values()) == 11


def test_the_trainer_finds_what_the_data_follow():
    model = HiddenLayerRegression(3, 7)
    model.initialise(0)
    data = examples(200)
    plan = TrainingPlan(epochs=60, batch_size=10, learning_rate=0.03, proximal_mu=0.0, seed=(0,))
    loss = NumpyTrainer(model, SGD).fit(data, plan)
    assert loss < 0.1 < np.square(data.y - data.y.mean()).mean()


# The base class


def test_the_figure_of_merit_is_the_rmse():
    metrics = task("linear").metrics(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 6.0], np.float32))
    assert metrics == pytest.approx({"loss": 3.0, "rmse": 3.0**0.5})


def test_examples_kept_back_need_no_equal_targets():
    """Stratified by value, a client of four rows would keep none back."""
    strata = task("linear").strata(np.array([0.1, 0.2, 0.3, 0.4]))
    assert strata.tolist() == [0, 0, 0, 0]


def test_a_node_s_own_file_holds_numbers(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=np.ones((3, 2)), y=np.array([0.5, -1.0, 7.0]))
    read = task("linear").read(path)
    assert read.y.dtype == np.float32 and read.y.tolist() == [0.5, -1.0, 7.0]
    with pytest.raises(DataError, match="integer labels"):
        task("digits").read(path)
    np.savez(path, x=np.ones((3, 2)), y=np.array([0.5, np.nan, 7.0]))
    with pytest.raises(DataError, match="targets that are not finite numbers"):
        task("linear").read(path)


def test_what_deals_by_class_is_refused():
    def check(partition):
        linear = task("linear", partition=partition)
        with pytest.raises(ConfigError, match=f"task.partition = '{partition}' deals by class, and .* has none"):
            deal(linear.config, linear.partition, linear.load(), 4, linear.classes, 0)

    assert not failures(["shards", "dirichlet", "table"], check)


# Linear


def test_two_populations_follow_the_two_optima():
    data = task("linear").load()
    assert data.train.x.shape == (USERS * SAMPLES, 2) and data.train.x.dtype == data.train.y.dtype == np.float32
    assert np.array_equal(data.test_owners, data.owners) and np.bincount(data.owners).tolist() == [SAMPLES] * USERS
    for number, optimum in enumerate(OPTIMA):
        mine = data.train.take(np.flatnonzero(data.owners % 2 == number))
        noise = mine.y - mine.x @ optimum
        assert noise.min() > -1e-5 and noise.max() < 1 + 1e-5 and abs(noise.mean() - 0.5) < 0.1
    assert not np.isin(data.train.x[:, 0], data.test.x[:, 0]).any()


def test_the_data_are_the_same_every_time():
    first, again = task("linear").load(), task("linear").load()
    assert np.array_equal(first.train.x, again.train.x) and np.array_equal(first.test.y, again.test.y)


def test_a_user_is_a_client_and_there_are_no_more():
    linear = task("linear")
    parts = deal(linear.config, linear.partition, linear.load(), 7, 0, 0)
    assert [part.tolist() for part in parts] == [list(range(10 * i, 10 * i + 10)) for i in range(7)]
    with pytest.raises(ConfigError, match="has 100 owners for 101 clients"):
        deal(linear.config, linear.partition, linear.load(), 101, 0, 0)


# Keras


def test_two_parameters_in_keras_follow_the_data():
    pytest.importorskip("keras")
    from cloister.training.keras_trainer import KerasTrainer

    linear = task("linear", model="keras")
    model, data = linear.build(), linear.load()
    model.initialise(3)
    (first,) = model.arrays().values()
    assert first.size == 2 and model.predict(data.test.x).shape == (len(data.test),)
    plan = TrainingPlan(epochs=30, batch_size=10, learning_rate=0.1, proximal_mu=0.0, seed=(1,))
    KerasTrainer(model, SGD).fit(data.train.take(np.flatnonzero(data.owners % 2 == 1)), plan)
    (last,) = model.arrays().values()
    assert np.linalg.norm(last.ravel() - OPTIMA[1]) < 0.3


def test_keras_trains_on_the_squared_error_as_numpy_does():
    pytest.importorskip("keras")
    from cloister.training.keras_trainer import KerasTrainer

    charges = task("hospital-charges", model="keras")
    keras_model, numpy_model = charges.build(), HiddenLayerRegression(3, 2)
    numpy_model.initialise(0)
    names = dict(zip(keras_model.arrays(), numpy_model.weights, strict=True))
    start = numpy_model.arrays()
    keras_model.assign({path: start[n].reshape(keras_model.arrays()[path].shape) for path, n in names.items()})
    data = examples(12)
    plan = TrainingPlan(epochs=3, batch_size=4, learning_rate=0.02, proximal_mu=0.0, seed=(1,))
    losses = [KerasTrainer(keras_model, SGD).fit(data, plan), NumpyTrainer(numpy_model, SGD).fit(data, plan)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for path, name in names.items():
        np.testing.assert_allclose(keras_model.arrays()[path].ravel(), numpy_model.weights[name].ravel(), atol=1e-5)
    predicted = keras_model.predict(data.x)
    assert predicted.shape == (12,)
    np.testing.assert_allclose(predicted, numpy_model.predict(data.x), atol=1e-5)
