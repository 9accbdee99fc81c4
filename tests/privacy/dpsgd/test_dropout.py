"""Layers that draw: what is known of them, and what happens to an example where it is not."""

import keras
import numpy as np
import pytest
from examples_of_dpsgd import (
    Scaled,
    batch,
    dp_sgd,
    head,
    norm,
    relative_error,
    small,
)

from cloister.utils.errors import UnsupportedModel

layers = keras.layers


class MixedNowAndThen(keras.Layer):
    """Couples examples for one random state in ten."""

    def __init__(self, seed):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x):
        mixed = keras.random.uniform((), seed=self.seed_generator) < 0.1
        return x + keras.ops.where(mixed, x[::-1], 0.0)


class DropsAConstant(keras.Layer):
    """Adds a constant of which dropout leaves the same part to every example of a call."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.dropout = rows, layers.Dropout(0.5)

    def call(self, x, training=False):
        return x + self.dropout(keras.ops.ones((self.rows, x.shape[-1])), training=training)[:1]


class MyDropout(layers.Dropout):
    """Anybody's: what it does is not known."""


def test_layers_that_mix_examples_are_refused_whatever_they_would_draw():
    for mix in (layers.MixUp, layers.CutMix):
        inputs = keras.Input((4, 4, 1))
        model = keras.Model(inputs, head(layers.Flatten()(mix(seed=1)(inputs))))
        with pytest.raises(UnsupportedModel, match="mixes the examples of a batch"):
            dp_sgd(model)


@pytest.mark.slow
def test_a_layer_whose_draws_are_not_known_is_given_one_example_at_a_time():
    """It mixes examples for one state in ten; of a subclass the graph shows what it does."""
    for layer, method in (
        (MixedNowAndThen(1), "in turn"),
        (MyDropout(0.5), "rows"),
        (layers.Dropout(0.5), "rows"),
        (layers.GaussianNoise(0.5), "rows"),
    ):
        assert dp_sgd(small(layers.Dense(4), layer)).method == method


@pytest.mark.slow
def test_a_mask_that_a_call_shares_cannot_let_an_example_move_the_sum_by_pushing_others_into_the_next_call():
    """Opposite gradients at the end of each call of 16 cancelled, and one example in front undid that: 7.9·S."""
    for layer, method in (
        (layers.Dropout(0.5, noise_shape=(1, 4)), "in turn"),
        (layers.AlphaDropout(0.5, noise_shape=[1, None]), "in turn"),
        (layers.Dropout(0.5, noise_shape=(None, 1)), "rows"),
    ):
        assert dp_sgd(small(layers.Dense(4), layer)).method == method, layer.name


@pytest.mark.slow
def test_nor_can_one_that_dropout_makes_of_something_else_than_examples():
    """Also where it has as many rows as a trial has examples."""
    for layer, method in (
        (DropsAConstant(1), "in turn"),
        (DropsAConstant(3), "in turn"),
        (DropsAConstant(4), "in turn"),
        (layers.Dropout(0.5), "rows"),
    ):
        model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(3, activation="softmax")])
        assert dp_sgd(model).method == method, layer.name
        assert "call" not in vars(layer), "it is as it was"


@pytest.mark.slow
def test_no_draw_of_such_a_layer_lets_an_example_move_the_sum_by_more_than_the_bound():
    model = small(MixedNowAndThen(1), layers.Dense(4))
    step = dp_sgd(model, batch_size=16)
    x, y = batch(model, 16)
    x[-1] = -1e6
    for state in range(40):
        sums = []
        for rows in (slice(None), slice(0, 15)):
            step.reseed(state)
            sums.append(step.clipped_sum(x[rows], y[rows], 1.0).sums)
        assert norm([a - b for a, b in zip(*sums, strict=True)]) <= 1.0


@pytest.mark.slow
def test_dropout_differs_between_examples_and_between_steps():
    for build in (small, lambda *inner: small(*inner, Scaled())):
        model = build(layers.Dense(50, activation="tanh"), layers.Dropout(0.5))
        step = dp_sgd(model)
        x, y = (np.repeat(array, 2, axis=0) for array in batch(model, 1))
        one = [step.clipped_sum(x[:1], y[:1], 100.0).sums for _ in range(2)]
        both = step.clipped_sum(x, y, 100.0).sums
        assert relative_error(one[0], one[1]) > 0.05
        assert relative_error([total / 2 for total in both], one[1]) > 0.05


class DropsWithin(layers.Layer):
    """A dense layer whose activation draws."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5)
        self.dense = layers.Dense(8, activation=lambda x: self.dropout(keras.ops.tanh(x), training=True))

    def call(self, x):
        return self.dense(x)


def test_a_draw_within_a_dense_layer_follows_its_seed():
    """Places are the same each time; only the seeds of the masks differ."""
    step = dp_sgd(small(DropsWithin()))
    x, y = batch(step.model)
    sums = []
    for seed in (1, 1, 2):
        step.reseed(seed)
        step._clipped_sums.draws.places = lambda units, room: list(range(units))
        sums.append(step.clipped_sum(x, y, 1e3).sums)
    assert step.method == "rows"
    assert all(np.array_equal(*same) for same in zip(*sums[:2], strict=True))
    assert norm([one - other for one, other in zip(*sums[1:], strict=True)]) > 1e-2
