"""What is of Keras alone in training: one graph for every client, random layers, callbacks, names and files."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.training.keras_trainer import KerasTrainer
from cloister.training.plan import TrainingPlan
from cloister.utils.errors import ConfigError

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
    """A model that is built once."""
    return KerasModel(linear)


@pytest.fixture
def model():
    model = of_all_tests()
    model.initialise(3)
    return model


def test_one_graph_serves_clients_of_any_size(model):
    trainer = KerasTrainer(model, SGD)
    for size in (40, 17, 3, 1):
        trainer.fit(DATA.take(np.arange(size)), plan(batch_size=7))
    assert trainer._plain.experimental_get_tracing_count() == 1


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


class TestRecipe:
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
