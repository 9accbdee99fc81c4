"""Trials of gradients, under the weights of a model and under others."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    Reversed,
    batch,
    dp_sgd,
    functional,
    small,
)

from cloister.core.errors import UnsupportedModel
from cloister.privacy.dpsgd import trial_weights, trials
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.probe import made_up
from cloister.privacy.dpsgd.trial_weights import moved

layers = keras.layers


class NeverFinite(layers.Layer):
    """As a root of a weight that random numbers make negative."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(64,), initializer="ones")

    def call(self, x):
        return x * keras.ops.sum(keras.ops.sqrt(self.scale - 0.9))


def test_a_model_of_which_nothing_is_finite_under_random_weights_is_refused():
    with pytest.raises(UnsupportedModel, match="not finite under any of 3 sets"):
        dp_sgd(small(NeverFinite()))


@pytest.mark.slow
def test_random_weights_show_a_wrong_gradient_that_those_of_the_model_hide():
    """The gradient of a layer that is shown examples in another order is nothing beside that of the other branch."""

    def inner(x):
        far, other = layers.Dense(16, name="far")(x), Reversed()(x)
        return layers.Dense(5, activation="softmax", name="top")(layers.Concatenate()([far, other]))

    model = functional((6,), inner)
    far, top = model.get_layer("far"), model.get_layer("top")
    far.bias.assign(far.bias + 1e7)
    top.kernel.assign(tf.zeros_like(top.kernel.value))
    assert trials.ModelTrials(model, LOSS, made_up(model)).first.agrees_by_layer(Gradients(model, LOSS, by_layer=True))
    assert dp_sgd(model).method == "model"


@pytest.mark.slow
def test_no_random_weights_let_no_gradient_past_a_normalisation():
    """With a scale of 0 nothing of a wrong gradient is left in front of it, and two such trials of four are enough."""
    model = small(Reversed(), layers.LayerNormalization())
    assert dp_sgd(model).method == "model"
    for number in range(len(trial_weights.SCALES)):
        with trial_weights.random_weights(model, number):
            assert all(np.any(variable) for variable in model.trainable_variables)


def test_a_model_that_is_certain_of_a_made_up_example_is_no_reason_to_refuse_it():
    """Its gradient is 0 there, to the last bit, and nothing can be compared by dividing."""
    model = functional((6,), lambda x: keras.layers.Dense(3, activation="softmax")(x))
    model.set_weights([np.zeros((6, 3), np.float32), np.array([200, 0, -200], np.float32)])
    probe = (np.ones((3, 6), np.float32), np.array([0, 1, 2]))
    assert dp_sgd(model, probe=probe).method == "layers"


@pytest.mark.parametrize("seed", range(5))
def test_a_trial_does_not_saturate_a_layer_of_many_inputs(seed):
    """Weights that move by the same amount in every layer add up to outputs at which no gradient can be compared."""
    kernel = keras.Variable(np.zeros((100_000, 4), np.float32))
    assert 0 < np.abs(np.ones(100_000) @ np.asarray(moved(kernel, seed))).max() < 5


@pytest.mark.parametrize(
    ("passes", "agree", "tried"),
    [
        ([1, 1], True, 2),
        ([0, 1, 1, 1], True, 4),
        ([0, 0, 0, 1, 1, 1], True, 6),
        ([0, 0, 0, 0, 1], False, 5),
        ([0] * 5, False, 5),
        ([1, 0, 1, 1], True, 4),
        ([1, 0, 0, 0, 0, 1], False, 6),
    ],
)
def test_a_model_that_fails_beside_a_kink_is_tried_under_other_weights(passes, agree, tried):
    model, seen = small(), []

    def check(trial):
        seen.append(trial)
        return bool(passes[len(seen) - 1])

    x, y = batch(model, 3)
    assert trials.ModelTrials(model, LOSS, (x, y)).passes(check) == agree
    first = [trial._values[0].numpy() for trial in seen]
    assert len(seen) == tried and len({values.tobytes() for values in first}) == tried


class Narrow(layers.Layer):
    """Raises an exception where its bias is far from 0."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(4,), initializer="zeros")

    def call(self, x):
        return x + tf.debugging.check_numerics(tf.sqrt(0.5 - tf.abs(self.bias)), "none") + self.bias


def test_a_model_that_cannot_be_tried_under_other_weights_is_refused():
    with pytest.raises(UnsupportedModel, match=r"InvalidArgumentError in a trial on made-up"):
        dp_sgd(small(layers.Dense(4), Narrow()))
