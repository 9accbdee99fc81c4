"""Masks of dropout, and what a batch's size and places tell: neither may let one example move a sum by more than S."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import batch, dp_sgd, moved, perturbed, relative_error, take_in_turn
from support import mostly_slow

from cloister.client.dp_sgd_keras import PrivateKerasTrainer
from cloister.config.privacy import PrivacyConfig
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.training.plan import TrainingPlan

layers = keras.layers


def with_dropout():
    return keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.5), layers.Dense(3, "softmax")])


class TestDropout:
    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["rows", "in turn"])
    def test_whoever_makes_the_model_does_not_know_the_masks(self, method, monkeypatch):
        if method == "in turn":
            take_in_turn(monkeypatch)
        keras.utils.set_random_seed(1)
        step = dp_sgd(with_dropout())
        x, y = batch(step.model, 4)
        one, other = (step.clipped_sum(x, y, 1.0).sums for _ in range(2))
        assert relative_error(one, other) > 0.05 and step.method == method

    @pytest.mark.parametrize(("noise_seed", "repeats"), mostly_slow([(-1, False), (7, True)], [(-1, False)]))
    def test_a_trainer_draws_them_anew_whatever_the_server_knows(self, noise_seed, repeats):
        privacy = PrivacyConfig(server="none", client="dp-sgd", dp_sgd_noise_multiplier=1e-3, noise_seed=noise_seed)
        model = KerasModel(with_dropout)
        trainer = PrivateKerasTrainer(model, Recipe(1, 4, 0.1), privacy)
        plan = TrainingPlan(epochs=1, batch_size=4, learning_rate=0.1, proximal_mu=0.0, seed=(1, 1, 0), round=1)
        x, y = batch(model.keras, 8)
        drawn = []
        for _ in range(2):
            trainer.fit(Examples(x, y), plan)
            drawn.append(trainer._dp_sgd._clipped_sums.draws.seeds(1))
        assert np.array_equal(*drawn) == repeats


class OverTheBatch(layers.Layer):
    """What an example gets depends on how many there are."""

    def call(self, x):
        return x / tf.cast(tf.shape(x)[0], x.dtype) * 8.0


class ByPlace(layers.Layer):
    """What an example gets depends on where it stands."""

    def call(self, x):
        return x * tf.cast(tf.range(1, tf.shape(x)[0] + 1), x.dtype)[:, None]


@pytest.mark.slow
def test_an_example_that_depends_on_its_company_moves_the_sum_by_the_bound_at_most():
    for kind in (OverTheBatch, ByPlace):
        model = perturbed(keras.Sequential([keras.Input((6,)), layers.Dense(8), kind(), layers.Dense(3, "softmax")]))
        step = dp_sgd(model, clipping_norm=0.1)
        assert step.method == "rows", "calls have one shape"
        assert 0 < moved(step, *batch(model, 17), 0.1) <= 1, kind
