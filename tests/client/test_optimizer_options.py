"""Options of the optimizer, learning rates that callbacks set, and what is refused by name before a training."""

from dataclasses import replace

import keras
import numpy as np
import pytest
from support import failures

from cloister.client.dp_sgd_keras import PrivateKerasTrainer
from cloister.config.run import RunConfig, parse
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.datasets.patients import BreastCancer
from cloister.tasks.keras_model import KerasModel
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.tasks.recipe import recipe_faults
from cloister.training.keras_trainer import KerasTrainer, optimizer_named
from cloister.training.plan import Schedule, TrainingPlan
from cloister.training.trainers import NumpyTrainer
from cloister.utils.errors import ConfigError

RNG = np.random.default_rng(0)
DATA = Examples(RNG.random((24, 5)).astype(np.float32), RNG.integers(0, 3, 24))
SGD = Recipe(1, 24, 0.5)


def model():
    made = KerasModel(lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax", name="out")]))
    made.initialise(1)
    return made


def plan(epochs=1, rate=0.5, **more):
    return TrainingPlan(epochs, 24, rate, 0.0, (1, 1, 0), **more)


def slope(kernel, bias):
    scores = np.exp(DATA.x @ kernel + bias)
    scores /= scores.sum(axis=1, keepdims=True)
    scores[np.arange(24), DATA.y] -= 1
    return DATA.x.T @ scores / 24, scores.mean(axis=0)


def trained_by_hand(arrays, rates, momentum=0.0, decay=0.0):
    """Keras' SGD: decoupled decay, then a step with momentum."""
    weights = [np.asarray(array, np.float64) for array in arrays]
    velocity = [np.zeros_like(each) for each in weights]
    for rate in rates:
        steps = slope(*weights)
        velocity = [momentum * old - rate * step for old, step in zip(velocity, steps, strict=True)]
        weights = [(1 - decay * rate) * each + moved for each, moved in zip(weights, velocity, strict=True)]
    return weights


def check_training(recipe, the_plan, rates, **options):
    made = model()
    expected = trained_by_hand(made.arrays().values(), rates, **options)
    KerasTrainer(made, recipe).fit(DATA, the_plan)
    for found, array in zip(made.arrays().values(), expected, strict=True):
        np.testing.assert_allclose(found, array, atol=2e-6)


class TestOptions:
    @pytest.mark.parametrize("options", [{"momentum": 0.9}, {"weight_decay": 0.2}])
    def test_they_act_on_training(self, options):
        named = {"weight_decay": "decay"}
        own = {named.get(name, name): value for name, value in options.items()}
        check_training(replace(SGD, optimizer_options=options), plan(3), [0.5] * 3, **own)

    def test_they_act_under_dp_sgd_on_noised_sums(self):
        private = parse({"privacy.client": "dp-sgd", "privacy.dp-sgd-noise-multiplier": 0.0}).privacy
        moved = []
        for options in ({}, {"weight_decay": 0.5}):
            made = model()
            trainer = PrivateKerasTrainer(made, replace(SGD, optimizer_options=options), private)
            start = made.arrays()["sequential/out/kernel"]
            trainer.fit(DATA.take(np.arange(0)), plan(public_size=24))
            moved.append(made.arrays()["sequential/out/kernel"] / start)
        np.testing.assert_allclose(moved[0], 1)
        np.testing.assert_allclose(moved[1], 1 - 0.5 * 0.5, rtol=1e-6)

    def test_the_key_is_written_as_those_of_other_plugins(self):
        for text in ("momentum=0.9 weight-decay=0.01", "momentum = 0.9\nweight_decay = 0.01\n"):
            client = parse({"client.optimizer-options": text}).client
            assert SGD.resolved(client).optimizer_options == {"momentum": 0.9, "weight_decay": 0.01}
        assert parse(RunConfig(client=client).flat()).client == client

    def test_another_optimizer_does_not_get_those_of_the_recipe(self):
        recipe = replace(SGD, optimizer_options={"momentum": 0.9})
        assert recipe.resolved(parse({}).client).optimizer_options == {"momentum": 0.9}
        assert recipe.resolved(parse({"client.optimizer": "sgd"}).client).optimizer_options == {"momentum": 0.9}
        assert recipe.resolved(parse({"client.optimizer": "adam"}).client).optimizer_options == {}
        assert recipe.resolved(parse({"client.optimizer-options": ""}).client).optimizer_options == {}

    def test_an_optimizer_without_the_option_names_those_it_has(self):
        def check(name, options, says):
            with pytest.raises(ConfigError) as refused:
                optimizer_named(name, options)
            assert all(part in str(refused.value) for part in ("client.optimizer-options", *says))

        assert not failures(
            [
                ("adam", {"momentum": 0.9}, ["'adam' has no option 'momentum'", "beta_1, beta_2, epsilon"]),
                ("adam", {"beta1": 0.9}, ["did you mean 'beta_1'"]),
                ("sgd", {"learning_rate": 0.1}, ["client.learning-rate sets it"]),
                ("sgd", {"use_ema": True}, ["use_ema has no effect"]),
                ("sgd", {"ema_momentum": 0.9}, ["no option 'ema_momentum'"]),
                ("sgd", {"momentum": 9.0}, ["momentum=9.0 is not valid"]),
                ("sgd", {"nesterov": 1}, ["nesterov = 1", "true or false"]),
                ("rmsprop", {"rho": True}, ["rho = True", "a number"]),
            ],
            check,
        )

    def test_texts_that_are_no_options_are_refused_before_a_run(self):
        for text, says in (("momentum", "key=value"), ("momentum='x'", "momentum = 'x'"), ("momentum=nan", "nan")):
            with pytest.raises(ConfigError, match=r"client\.optimizer-options") as refused:
                parse({"client.optimizer-options": text})
            assert says in str(refused.value)

    def test_a_model_in_numpy_has_none(self):
        with pytest.raises(ConfigError, match=r"client\.optimizer-options: momentum needs a model in Keras"):
            NumpyTrainer(SoftmaxRegression(5, 3), replace(SGD, optimizer_options={"momentum": 0.9}))

    def test_objects_of_keras_in_a_recipe_are_refused_by_their_type(self):
        task = BreastCancer(parse({"task.name": "breast-cancer"}).task)
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        for changes, says in (
            ({"learning_rate": decay}, "client.learning-rate is of type ExponentialDecay"),
            ({"learning_rate": 0.0}, "client.learning-rate is 0.0"),
            ({"optimizer": keras.optimizers.SGD(momentum=0.9)}, "client.optimizer is of type SGD"),
        ):
            (found,) = recipe_faults(task, replace(task.recipe, **changes))
            assert found.startswith(says)


class Stepped(keras.callbacks.Callback):
    """A schedule of one's own, with a fixed rate."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.4 / (1 + epoch)


CALLBACKS = {
    "scheduler": (lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate), [0.25, 0.125, 0.0625]),
    "plateau": (
        lambda: keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=100.0, factor=0.1),
        [0.5, 0.5, 0.05],
    ),
    "own": (Stepped, [0.4, 0.2, 0.4 / 3]),
}


class TestRates:
    @pytest.mark.parametrize("name", CALLBACKS)
    def test_an_epoch_is_at_the_rate_that_a_callback_sets(self, name):
        make, rates = CALLBACKS[name]
        check_training(replace(SGD, callbacks=lambda: [make()]), plan(3), rates)

    def test_a_callback_changes_the_rate_of_a_schedule_by_a_factor(self):
        make, _ = CALLBACKS["scheduler"]
        the_plan = plan(2, schedule=Schedule("linear", 1))
        assert [the_plan.rate(epoch) for epoch in range(2)] == [0.5, 0.25]
        check_training(replace(SGD, callbacks=lambda: [make()]), the_plan, [0.5 * 0.5, 0.25 * 0.5 * 0.5])

    def test_each_training_begins_anew_and_leaves_the_model_as_it_was(self):
        made, start, ends = model(), None, []
        trainer = KerasTrainer(made, replace(SGD, callbacks=lambda: [CALLBACKS["scheduler"][0]()]))
        for _ in range(2):
            start = start or made.arrays()
            made.assign(start)
            trainer.fit(DATA, plan(2))
            ends.append(made.arrays()["sequential/out/kernel"])
        np.testing.assert_array_equal(*ends)
        assert "optimizer" not in vars(made.keras), "Keras would save it with the model"

    def test_a_failing_callback_leaves_the_model_as_it_was(self):
        class Fails(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                raise RuntimeError

        made = model()
        made.keras.compile("adam", "mean_squared_error")
        own = made.keras.optimizer
        with pytest.raises(RuntimeError):
            KerasTrainer(made, replace(SGD, callbacks=lambda: [Fails()])).fit(DATA, plan())
        assert made.keras.optimizer is own

    def test_what_a_training_does_not_have_is_refused_by_the_name_of_the_callback(self):
        class ByBatch(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                self.model.optimizer.learning_rate = 1.0

        def check(make, says):
            with pytest.raises(ConfigError, match=r"^recipe\.callbacks") as refused:
                KerasTrainer(model(), replace(SGD, callbacks=make))
            assert says in str(refused.value)

        assert not failures(
            [
                (lambda: [keras.callbacks.EarlyStopping("val_loss")], "EarlyStopping monitors 'val_loss'"),
                (
                    lambda: [keras.callbacks.EarlyStopping("accuracy", mode="max")],
                    "has 'loss' alone; use monitor='loss'",
                ),
                (lambda: [keras.callbacks.ReduceLROnPlateau()], "ReduceLROnPlateau monitors 'val_loss'"),
                (lambda: [ByBatch()], "ByBatch defines on_train_batch_begin"),
                (lambda: [keras.callbacks.LambdaCallback(on_train_batch_end=print)], "LambdaCallback defines on_train"),
                (lambda: None, "must return a list"),
                (lambda: [keras.optimizers.SGD()], "must return a list"),
            ],
            check,
        )

    def test_early_stopping_on_the_loss_ends_a_training(self):
        seen = []
        stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100.0)
        note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
        KerasTrainer(model(), replace(SGD, callbacks=lambda: [note, stop])).fit(DATA, plan(9))
        assert len(seen) < 9
