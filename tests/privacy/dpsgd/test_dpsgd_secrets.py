"""Masks of dropout, and what a batch's size and places tell: neither may let one example move a sum by more than S."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import batch, dp_sgd, norm, perturbed
from support import mostly_slow

from cloister.client.training.dp_sgd_keras_trainer import PrivateKerasTrainer
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.tasks.training.plan import TrainingPlan

layers = keras.layers


def with_dropout():
    return keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.5), layers.Dense(3, "softmax")])


def seeds_of(model):
    return [np.array(v.numpy()) for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]


class TestDropout:
    @pytest.mark.slow
    def test_whoever_makes_the_model_does_not_know_the_masks(self):
        keras.utils.set_random_seed(1)
        one, other = with_dropout(), with_dropout()
        before = seeds_of(one)
        steps = [dp_sgd(one), dp_sgd(other)]
        assert not np.array_equal(seeds_of(one)[0], before[0])
        assert not np.array_equal(seeds_of(one)[0], seeds_of(other)[0])
        steps[0].reseed()
        assert steps[0].method == "layers"

    @pytest.mark.slow
    def test_seeded_noise_leaves_them_as_they_are(self):
        model = with_dropout()
        before = seeds_of(model)
        dp_sgd(model, noise=GaussianNoise(1))
        assert np.array_equal(seeds_of(model)[0], before[0])

    @pytest.mark.parametrize(("noise_seed", "repeats"), mostly_slow([(-1, False), (7, True)], [(-1, False)]))
    def test_a_trainer_draws_them_anew_whatever_the_server_knows(self, noise_seed, repeats):
        privacy = PrivacyConfig(server="none", client="dp-sgd", client_noise_multiplier=1e-3, noise_seed=noise_seed)
        model = KerasModel(with_dropout)
        trainer = PrivateKerasTrainer(model, Recipe(1, 4, 0.1), privacy)
        plan = TrainingPlan(epochs=1, batch_size=4, learning_rate=0.1, proximal_mu=0.0, seed=(1, 1, 0), round=1)
        x, y = batch(model.keras, 8)
        drawn = []
        for _ in range(2):
            trainer.fit(Examples(x, y), plan)
            drawn.append(seeds_of(model.keras)[0])
        assert np.array_equal(*drawn) == repeats


class OverTheBatch(layers.Layer):
    """What an example gets depends on how many there are."""

    def call(self, x):
        return x / tf.cast(tf.shape(x)[0], x.dtype) * 8.0


class ByPlace(layers.Layer):
    """What an example gets depends on where it stands."""

    def call(self, x):
        return x * tf.cast(tf.range(1, tf.shape(x)[0] + 1), x.dtype)[:, None]


@pytest.mark.parametrize("kind", [OverTheBatch, ByPlace])
@pytest.mark.slow
def test_an_example_that_depends_on_its_company_is_taken_alone(kind):
    model = perturbed(keras.Sequential([keras.Input((6,)), layers.Dense(8), kind(), layers.Dense(3, "softmax")]))
    step = dp_sgd(model, clipping_norm=0.1, microbatch_size=32)
    assert step.method == "model"
    x, y = batch(model, 17)
    everybody, others = step.clipped_sum(x, y, 0.1), step.clipped_sum(x[1:], y[1:], 0.1)
    moved = norm([a - b for a, b in zip(everybody.sums, others.sums, strict=True)])
    assert moved <= 0.1 * (1 + 1e-4)
