"""Keras training: the right gradient, one graph for every client, nothing carried from one client to the next."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.tasks.recipe import Augmentation
from cloister.tasks.targets import cross_entropies
from cloister.training.keras_trainer import KerasTrainer
from cloister.training.plan import Schedule, TrainingPlan
from cloister.utils.errors import ConfigError, FederationError

RNG = np.random.default_rng(0)
SGD = Recipe(1, 8, 0.1)
DATA = Examples(RNG.random((40, 6)).astype(np.float32), RNG.integers(0, 3, 40))


def plan(**changes):
    defaults = {"epochs": 1, "batch_size": 8, "learning_rate": 0.1, "proximal_mu": 0.0, "seed": (1, 1, 0)}
    return TrainingPlan(**(defaults | changes))


def linear():
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax", name="out")], name="net")


def with_everything():
    """Automatic names, batch normalisation (weights that are not trained) and dropout (a random state)."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3, "softmax"),
        ],
        name="net",
    )


@cache
def of_all_tests():
    """A model and its trainer, whose graphs are traced once."""
    model = KerasModel(linear)
    return model, KerasTrainer(model, SGD)


@pytest.fixture
def model():
    model, _ = of_all_tests()
    model.initialise(3)
    return model


@pytest.fixture
def trainer(model):
    return of_all_tests()[1]


def gradient(arrays, x, y):
    """Of the mean cross-entropy of a softmax layer, by hand."""
    scores = x @ arrays["net/out/kernel"] + arrays["net/out/bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    residual = scores / scores.sum(axis=1, keepdims=True)
    residual[np.arange(len(y)), y] -= 1
    return {"net/out/kernel": x.T @ residual / len(y), "net/out/bias": residual.mean(axis=0)}


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_sgd_follows_the_gradient_of_what_is_minimised(model, trainer, mu):
    expected = model.arrays()
    anchor = {name: array.copy() for name, array in expected.items()}
    for epoch_order in [np.random.default_rng((1, 1, 0)).permutation(40)]:
        for start in range(0, 40, 8):
            batch = epoch_order[start : start + 8]
            slope = gradient(expected, DATA.x[batch], DATA.y[batch])
            expected = {k: w - 0.1 * (slope[k] + mu * (w - anchor[k])) for k, w in expected.items()}
    trainer.fit(DATA, plan(proximal_mu=mu))
    for name, array in model.arrays().items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6)


def test_a_larger_mu_keeps_the_client_closer_to_the_global_model(model, trainer):
    start = model.arrays()
    moved = []
    for mu in (0.0, 0.5, 5.0):
        model.assign(start)
        trainer.fit(DATA, plan(epochs=5, proximal_mu=mu))
        moved.append(np.linalg.norm(model.arrays()["net/out/kernel"] - start["net/out/kernel"]))
    assert moved[0] > moved[1] > moved[2] > 0


def test_one_graph_serves_clients_of_any_size(model):
    trainer = KerasTrainer(model, SGD)
    for size in (40, 17, 3, 1):
        trainer.fit(DATA.take(np.arange(size)), plan(batch_size=7))
    assert trainer._plain.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_nothing_is_carried_over(model, optimizer):
    start, trainer, ends = model.arrays(), KerasTrainer(model, replace(SGD, optimizer=optimizer)), []
    for _ in range(2):
        model.assign(start)
        trainer.fit(DATA, plan(epochs=2, learning_rate=0.01))
        ends.append(model.arrays())
    for name in start:
        np.testing.assert_array_equal(ends[0][name], ends[1][name])


def test_random_layers_depend_on_the_round_and_not_on_the_past():
    model = KerasModel(with_everything)
    model.initialise(1)
    start, trainer = model.arrays(), KerasTrainer(model, SGD)

    def trained(seed):
        model.assign(start)
        trainer.fit(DATA, plan(seed=seed))
        return model.arrays()["net/dense/kernel"]

    first, other, again = trained((1, 1, 0)), trained((1, 2, 0)), trained((1, 1, 0))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_names_do_not_depend_on_what_was_built_before():
    first, second = KerasModel(with_everything), KerasModel(with_everything)
    assert list(first.arrays()) == list(second.arrays())
    assert any("moving_mean" in name for name in first.arrays())
    second.assign(first.arrays())
    np.testing.assert_array_equal(first.predict(DATA.x), second.predict(DATA.x))


def test_the_seed_decides_the_initial_weights():
    model = KerasModel(linear)
    found = []
    for seed in (1, 1, 2):
        model.initialise(seed)
        found.append(model.arrays()["net/out/kernel"])
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_what_leaves_is_a_copy(model, trainer):
    arrays = model.arrays()
    before = arrays["net/out/kernel"].copy()
    trainer.fit(DATA, plan())
    np.testing.assert_array_equal(arrays["net/out/kernel"], before)


def test_the_loss_is_that_of_the_examples(model, trainer):
    loss = trainer.fit(DATA, plan(batch_size=40, learning_rate=1e-9))
    assert loss == pytest.approx(cross_entropies(DATA.y, model.predict(DATA.x)).mean(), rel=1e-5)


def test_a_saved_model_loads_with_keras_alone(model, tmp_path):
    import keras

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(DATA.x, verbose=0), model.predict(DATA.x), atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


@pytest.mark.parametrize("name", ["sgdd", "function"])
def test_an_unknown_optimizer(model, name):
    with pytest.raises(ConfigError, match=rf"client\.optimizer must be the name of a Keras optimizer.*'{name}'"):
        KerasTrainer(model, replace(SGD, optimizer=name))


def test_arrays_of_another_model(model):
    with pytest.raises(FederationError, match="'net/out/bias' is in only one"):
        model.assign({"net/out/kernel": np.zeros((6, 3))})
    with pytest.raises(FederationError, match=r"'net/out/bias' must have shape \(3,\), found \(4,\)"):
        model.assign({"net/out/kernel": np.zeros((6, 3)), "net/out/bias": np.zeros(4)})


class TestRecipe:
    def test_weights_multiply_the_losses_of_their_classes(self, model):
        weights = np.array([1.0, 4.0, 0.5])
        start = model.arrays()
        own = [gradient(start, DATA.x[i : i + 1], DATA.y[i : i + 1]) for i in range(40)]
        KerasTrainer(model, replace(SGD, class_weights=tuple(weights), loss_scale=2.0)).fit(DATA, plan(batch_size=40))
        for name, array in model.arrays().items():
            slope = np.mean([2.0 * weights[y] * each[name] for y, each in zip(DATA.y, own, strict=True)], axis=0)
            np.testing.assert_allclose(array, start[name] - 0.1 * slope, atol=1e-6)

    def test_weights_of_one_change_nothing(self, model, trainer):
        start, ends = model.arrays(), []
        for each in (trainer, KerasTrainer(model, replace(SGD, class_weights=(1.0, 1.0, 1.0)))):
            model.assign(start)
            each.fit(DATA, plan())
            ends.append(model.arrays()["net/out/kernel"])
        np.testing.assert_allclose(*ends, atol=1e-7)

    def test_an_epoch_is_at_the_rate_of_its_schedule(self, model, trainer):
        start = model.arrays()
        trainer.fit(DATA, plan(epochs=2, batch_size=40, schedule=Schedule("linear", 1)))
        found = model.arrays()
        expected = dict(start)
        for rate in (0.1, 0.05):
            slope = gradient(expected, DATA.x, DATA.y)
            expected = {name: array - rate * slope[name] for name, array in expected.items()}
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], atol=1e-6)

    def test_examples_are_changed_anew_in_every_epoch(self, model, trainer):
        seen = []

        def noted(example, rng):
            seen.append(float(rng.random()))
            return np.zeros_like(example)

        start = model.arrays()
        trainer.fit(DATA, plan(epochs=2, augmentation=Augmentation((noted,))))
        assert len(set(seen)) == len(seen) == 80
        np.testing.assert_array_equal(model.arrays()["net/out/kernel"], start["net/out/kernel"])

    def test_callbacks_hear_of_epochs_and_may_end_training(self, model):
        import keras

        heard = []

        class Listening(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                heard.append("begin")

            def on_epoch_end(self, epoch, logs=None):
                heard.append((epoch, sorted(logs)))
                self.model.stop_training = epoch == 1

            def on_train_end(self, logs=None):
                heard.append("end")

        trainer = KerasTrainer(model, replace(SGD, callbacks=lambda: [Listening()]))
        for _ in range(2):
            trainer.fit(DATA, plan(epochs=5))
        assert heard == ["begin", (0, ["loss"]), (1, ["loss"]), "end"] * 2
