"""Models of several inputs and outputs, as tuples and dicts of arrays."""

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from examples_of_dpsgd import batch, dp_sgd, functional, head, norm, relative_error, take_in_turn
from support import failures

from cloister.privacy.dpsgd.nested import take
from cloister.privacy.dpsgd.tracing import made_up
from cloister.utils.errors import ConfigError

layers = keras.layers
BOUND = 3.0


def model_of(structure):
    """Two inputs and two outputs that share a layer."""
    keras.utils.set_random_seed(7)
    left, right = keras.Input((4,), name="left"), keras.Input((3, 2), name="right")
    both = layers.Concatenate()([layers.Dense(5, "tanh")(left), layers.Flatten()(layers.Dense(4, "tanh")(right))])
    kind, size = layers.Dense(3, "softmax", name="kind")(both), layers.Dense(1, name="size")(both)
    if structure is dict:
        return keras.Model({"left": left, "right": right}, {"kind": kind, "size": size})
    return keras.Model((left, right), (kind, size))


def loss(y, outputs):
    (kind, size), (scores, number) = (tf.nest.flatten(each) for each in (y, outputs))
    return keras.losses.sparse_categorical_crossentropy(kind, scores) + keras.losses.mean_squared_error(size, number)


def examples(structure, count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 4)).astype(np.float32), rng.standard_normal((count, 3, 2)).astype(np.float32)
    y = rng.integers(0, 3, count), rng.standard_normal((count, 1)).astype(np.float32)
    if structure is dict:
        return dict(zip(("left", "right"), x, strict=True)), dict(zip(("kind", "size"), y, strict=True))
    return x, y


def by_brute_force(model, x, y, count):
    total = [np.zeros(variable.shape) for variable in model.trainable_variables]
    for i in range(count):
        with tf.GradientTape() as tape:
            own = tf.reduce_sum(loss(take(y, slice(i, i + 1)), model(take(x, slice(i, i + 1)), training=True)))
        gradient = [np.float64(each) for each in tape.gradient(own, [each.value for each in model.trainable_variables])]
        factor = min(1.0, BOUND / norm(gradient))
        total = [old + factor * new for old, new in zip(total, gradient, strict=True)]
    return total


@pytest.fixture(scope="module")
def by_name():
    return dp_sgd(model_of(dict), loss=loss, probe=examples(dict, 3))


@pytest.mark.parametrize("in_turn", [False, True])
def test_the_sum_is_that_of_one_example_at_a_time(in_turn, by_name, monkeypatch):
    step = by_name
    if in_turn:
        take_in_turn(monkeypatch)
        step = dp_sgd(by_name.model, loss=loss, probe=by_name.probe)
    found = step.clipped_sum(*examples(dict, 7, seed=1), BOUND)
    assert step.method == ("in turn" if in_turn else "rows")
    assert relative_error(found.sums, by_brute_force(step.model, *examples(dict, 7, seed=1), 7)) < 8e-4
    assert 0 < found.clipped < 7


def test_a_classifier_of_several_inputs_needs_no_probe():
    left, right = keras.Input((4,), name="a"), keras.Input((3,), dtype="int32", name="b")
    both = layers.Concatenate()([left, layers.Flatten()(layers.Embedding(5, 2)(right))])
    model = keras.Model({"a": left, "b": right}, head(both))
    x, y = made_up(model)
    assert {name: (array.shape, str(array.dtype)) for name, array in x.items()} == {
        "a": ((3, 4), "float32"),
        "b": ((3, 3), "int32"),
    }
    assert dp_sgd(model).step(x, y).examples == 3


def test_lists_and_tuples_of_arrays_are_alike():
    (x, y), (some, labels) = examples(tuple, 5), examples(tuple, 3)
    expected = by_brute_force(model_of(tuple), x, y, 5)
    for probed in (list, tuple):
        step = dp_sgd(model_of(tuple), loss=loss, probe=(probed(some), labels))
        for given in (list, tuple):
            found = step.clipped_sum(given(x), given(y), BOUND)
            assert relative_error(found.sums, expected) < 8e-4


@pytest.fixture(scope="module")
def simple():
    """A model of one input of six numbers."""
    return dp_sgd(functional((6,), head))


def test_other_arrays_than_those_of_numpy_are_taken(simple):
    x, y = batch(simple.model)
    for convert in (tf.constant, pd.DataFrame):
        assert simple.clipped_sum(convert(x), tf.constant(y), BOUND).non_finite == 0


WRONG = {
    "a missing input": (lambda x, y: ({"left": x["left"]}, y), "structure"),
    "an array in the place of a dict": (lambda x, y: (x["left"], y), "structure"),
    "lengths that differ": (lambda x, y: (x | {"left": x["left"][:2]}, y), "one length"),
    "another width": (lambda x, y: (x | {"left": x["left"][:, :3]}, y), "n, 4"),
    "labels of another shape": (lambda x, y: (x, y | {"size": y["size"][:, 0]}), "n, 1"),
}


def test_examples_that_the_model_does_not_take_are_refused(by_name):
    """Each of them would raise an exception, and so contribute zero without a word."""

    def check(name):
        change, said = WRONG[name]
        with pytest.raises(ConfigError, match=said):
            by_name.clipped_sum(*change(*examples(dict, 6)), BOUND)

    assert not failures(WRONG, check)


def test_one_array_of_another_width_is_refused(simple):
    x, y = batch(simple.model)
    with pytest.raises(ConfigError, match="n, 6"):
        simple.step(x[:, :5], y)
