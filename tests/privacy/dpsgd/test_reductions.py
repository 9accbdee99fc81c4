"""Sums over positions come out alike for every row, whoever makes them and whatever a trial of the model would show.

In each of the networks a sum over positions that is no layer's own has one term in a trial, or none that shows. The
server chooses weights by which it has many, and by which all but its roundings cancels.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import batch, brute_force, dp_sgd, first_moves, functional, head, relative_error
from support import mostly_slow

from cloister.privacy.dpsgd import in_rows
from cloister.privacy.dpsgd.reductions import chained_sums, even_sums, uneven_operations
from cloister.privacy.dpsgd.strides import stride

layers = keras.layers
BATCH = 16


class Position(layers.Layer):
    """Adds an embedding of positions: no two of them have the same numbers in a trial."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x):
        return x + self.table[None]


def excited(channels=12):
    """A gate of each channel, by which a product is broadcast over positions, before a maximum over them."""

    def inner(x):
        for _ in range(3):
            x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        gate = layers.Dense(4, activation="relu")(layers.GlobalMaxPooling2D()(x))
        gate = layers.Reshape((1, 1, channels))(layers.Dense(channels, activation="sigmoid")(gate))
        x = layers.GlobalMaxPooling2D()(layers.Multiply()([x, gate]))
        return layers.Dense(10, activation="softmax")(x)

    return functional((8, 8, 3), inner)


def open_gate(model, rng):
    *first, last, narrow, wide, top = (layer for layer in model.layers if layer.trainable_variables)
    channels = last.filters
    for layer in first:
        layer.set_weights([np.zeros(weight.shape) for weight in layer.get_weights()])
    last.set_weights([np.zeros(last.kernel.shape), np.full(channels, rng.uniform(1, 2))])
    signs = np.where(np.arange(channels) % 2, 1, -1)
    top.set_weights([signs[:, None] * rng.standard_normal(10) * 2.0**-30, np.zeros(10)])
    narrow.set_weights([np.zeros(narrow.kernel.shape), np.full(4, 2.0**-110)])
    kernel = np.round(rng.standard_normal((4, channels)) * 64) / 64
    kernel[:, -1] -= (kernel @ signs) * signs[-1]
    wide.set_weights([2.0**75 * kernel, np.zeros(channels)])


def parts_of_text(filters=13, parts=4):
    """Each part through the same convolution and a maximum over its positions, within a wrapper."""

    def inner(x):
        x = layers.Reshape((parts, 20, 9))(layers.Embedding(50, 9)(x))
        part = (Position(), layers.Conv1D(filters, 3, activation="relu"), layers.GlobalMaxPooling1D())
        x = layers.TimeDistributed(keras.Sequential([keras.Input((20, 9)), *part]))(x)
        return layers.Dense(10, activation="softmax")(layers.Flatten()(x))

    return functional((parts * 20,), inner, "int32")


def taken_whole(filters=13):
    """The same with a layer that draws once for all examples, which is why the model is taken as a whole."""

    def inner(x):
        x, convolution = Position()(layers.Embedding(50, 9)(x)), layers.Conv1D(filters, 3, activation="relu")
        largest, drawn = layers.GlobalMaxPooling1D(), layers.Dropout(0.2, noise_shape=(1, 9))
        both = layers.Concatenate()(
            [*(largest(convolution(x[:, i : i + 20])) for i in (0, 20, 40, 60)), drawn(largest(x))]
        )
        return layers.Dense(10, activation="softmax")(both)

    return functional((80,), inner, "int32")


def level(model, rng):
    """All positions are the largest ones, and what the parts give the biases cancels but for roundings."""
    (filters,) = (weight.shape[0] for weight in model.trainable_variables if weight.shape in ((13,), (12,)))
    for weight in model.trainable_variables:
        is_bias = weight.shape == (filters,)
        weight.assign(np.full(weight.shape, 2.0**-60 if is_bias else 0.0))
    top = model.layers[-1]
    parts = np.round(rng.standard_normal((4, filters, 10)) * 64) / 64
    parts[-1] = -parts[:-1].sum(axis=0)
    kernel = np.zeros(top.kernel.shape)
    kernel[: 4 * filters] = 2.0**35 * parts.reshape(-1, 10)
    top.set_weights([kernel, np.zeros(10)])


def saturated(channels=12):
    """A mean over positions, of which nothing shows below the threshold of the layer behind it."""
    keras.utils.set_random_seed(3)
    first = (
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Conv2D(channels, 3, activation="relu"),
    )
    rest = (layers.GlobalAveragePooling2D(), layers.ReLU(threshold=1e6), layers.Dense(10, activation="softmax"))
    return keras.Sequential([keras.Input((28, 28, 1)), *first, *rest])


def above_threshold(model, rng):
    first, second, top = (layer for layer in model.layers if layer.trainable_variables)
    first.set_weights([rng.standard_normal(first.kernel.shape) / 3, rng.uniform(0, 1, first.bias.shape)])
    ulp = np.spacing(np.float32(1))
    kernel = rng.standard_normal(second.kernel.shape)
    second.set_weights([2e7 * ulp * kernel, np.full(second.bias.shape, 1.3e7)])
    kernel = rng.standard_normal(top.kernel.shape).astype(np.float32)
    kernel -= kernel.mean(axis=0)
    top.set_weights([2.0**35 / 1e7 * kernel, -(2.0**35) * 1.3 * kernel.astype(np.float64).sum(axis=0)])


def large(channels=13):
    """A mean over many positions, saturated in a trial."""
    first = layers.Conv2D(channels, 1, activation="relu")
    rest = (layers.Rescaling(1e6), layers.ReLU(max_value=6.0), layers.Dense(10, activation="softmax"))
    return keras.Sequential([keras.Input((95, 95, 1)), first, layers.GlobalAveragePooling2D(), *rest])


def below_saturation(model, rng):
    first, top = (layer for layer in model.layers if layer.trainable_variables)
    ulp = np.spacing(np.float32(1))
    first.set_weights([2e-6 * ulp * rng.standard_normal(first.kernel.shape), np.full(first.bias.shape, 1.3e-6)])
    kernel = rng.standard_normal(top.kernel.shape).astype(np.float32)
    kernel -= kernel.mean(axis=0)
    top.set_weights([2.0**35 * kernel, -(2.0**35) * 1.3 * kernel.astype(np.float64).sum(axis=0)])


NETWORKS = {
    "a gate": (excited, open_gate, "rows"),
    "a wrapper": (parts_of_text, level, "in turn"),
    "the whole model": (taken_whole, level, "in turn"),
    "a threshold": (saturated, above_threshold, "rows"),
    "many positions": (large, below_saturation, "rows"),
}
IN_ROWS = [name for name, (_, _, method) in NETWORKS.items() if method == "rows"]


def farthest(build, choose):
    step = dp_sgd(build(), batch_size=BATCH)
    x, y = batch(step.model, BATCH, seed=2)
    moves = []
    for seed in range(6):
        choose(step.model, np.random.default_rng(seed))
        moves.append(first_moves(step, x, y))
    return step, max(moves)


@pytest.mark.parametrize("name", mostly_slow(NETWORKS, ["a gate"]))
def test_one_example_moves_the_sum_by_the_bound_at_most(name):
    build, choose, method = NETWORKS[name]
    step, moved = farthest(build, choose)
    assert 0 < moved <= 1 and step.method == method


@pytest.mark.long
@pytest.mark.parametrize("name", IN_ROWS)
def test_as_tensorflow_adds_up_it_moves_it_by_more_and_no_trial_shows_it(name, monkeypatch):
    monkeypatch.setattr(in_rows, "even_sums", chained_sums)
    monkeypatch.setattr(in_rows, "uneven_operations", lambda graph: [])
    build, choose, _ = NETWORKS[name]
    step, moved = farthest(build, choose)
    assert moved > 1.2 and step.method == "rows"


@pytest.mark.long
@pytest.mark.parametrize("name", IN_ROWS)
def test_where_sums_are_left_as_they_are_one_unit_is_computed_at_a_time(name, monkeypatch):
    monkeypatch.setattr(in_rows, "even_sums", chained_sums)
    build, choose, _ = NETWORKS[name]
    step, moved = farthest(build, choose)
    assert moved <= 1 and step.method == "in turn"


REDUCED = {
    "a sum": lambda x: tf.reduce_sum(x, 1),
    "a mean": lambda x: tf.reduce_mean(x, [1, 2]),
    "kept": lambda x: tf.reduce_sum(x, [1], keepdims=True),
    "from the end": lambda x: tf.reduce_sum(x, -2),
    "apart": lambda x: tf.reduce_sum(x, [1, 3]),
    "the first two": lambda x: tf.reduce_mean(x, [1, 2], keepdims=True),
    "of the last ones": lambda x: tf.reduce_sum(x, [2, 3]),
    "complex": lambda x: tf.math.real(tf.reduce_sum(tf.complex(x, -x) * tf.complex(x, x), 1)),
    "axes that are computed": lambda x: tf.reduce_sum(x, tf.cast(tf.round(tf.reduce_sum(0 * x) + 1), tf.int32)),
}


def traced(function, *specs):
    def within(*inputs):
        with even_sums():
            return function(*inputs)

    return tf.function(within, input_signature=specs, autograph=False).get_concrete_function()


@pytest.mark.parametrize("reduced", REDUCED.values(), ids=REDUCED)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", mostly_slow([tf.float32, tf.float64], [tf.float32]))
def test_a_reduction_is_the_same_with_its_gradient(reduced, known, dtype):
    x = tf.random.stateless_normal((4, 5, 6, 7), (1, 2), dtype=dtype)

    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = reduced(x)
            weighted = tf.reduce_sum(found * found)
        return found, tape.gradient(weighted, x)

    graph = traced(both, tf.TensorSpec(x.shape if known else [None] * 4, dtype))
    assert not uneven_operations(graph.graph)
    for found, expected in zip(graph(x), both(x), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


SHAPES = [(9, 10), (49, 12), (64, 50), (100, 3), (196, 33), (1000, 13), (9025, 13)]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.complex64])
@pytest.mark.parametrize("axis", [1, 2, (1, 2)])
def test_a_reduction_is_the_same_to_the_last_bit_wherever_a_row_stands(dtype, axis):
    for positions, channels in SHAPES:
        shape = (1, positions, channels) if axis == 1 else (1, channels, positions)
        one = np.random.default_rng(0).standard_normal(shape) * 2.0 ** np.random.default_rng(1).integers(-9, 9, shape)
        rows = tf.cast(np.repeat(one, BATCH, axis=0), dtype)
        found = traced(lambda x: tf.reduce_sum(x, axis), tf.TensorSpec(rows.shape, dtype))(rows).numpy()
        assert (found == found[0]).all()


@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 5, 7), (2, 4097)])
@pytest.mark.parametrize("known", [True, False])
def test_a_softmax_is_the_same_with_its_gradient(shape, known):
    scores = 10 * tf.random.stateless_normal(shape, (1, 2))

    def both(scores):
        with tf.GradientTape() as tape:
            tape.watch(scores)
            found = tf.nn.softmax(scores)
            weighted = tf.reduce_sum(found * found)
        return found, tape.gradient(weighted, scores)

    graph = traced(both, tf.TensorSpec(shape if known else [None] * len(shape)))
    assert not uneven_operations(graph.graph)
    for found, expected in zip(graph(scores), both(scores), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_operations_of_several_outputs_stay_as_they_are():
    """Of a concatenation of more than 16 parts the gradient is split: its list of parts must stay a list."""

    def gradients(x):
        parts = [x * number for number in range(17)]
        with tf.GradientTape() as tape:
            tape.watch(parts)
            total = tf.reduce_sum(tf.concat(parts, axis=-1) ** 2)
        return tape.gradient(total, parts)

    x = tf.ones((2, 3))
    for number, found in enumerate(traced(gradients, tf.TensorSpec(x.shape))(x)):
        np.testing.assert_array_equal(found, 2 * number * x)


SCORES = [(333,), (2001,), (13, 33), (49, 3), (49, 33), (100, 3), (4, 25, 25), (8, 16, 16)]


def rows_that_differ(function):
    """How many shapes of scores have a row that differs from the first."""
    count = 0
    for shape in SCORES:
        one = np.random.default_rng(0).standard_normal((1, *shape))
        rows = tf.constant(np.repeat(one, 3 * stride(), axis=0), tf.float32)
        found = function(tf.TensorSpec(rows.shape))(rows).numpy()
        count += not (found == found[0]).all()
    return count


def test_no_row_of_a_softmax_differs():
    assert not rows_that_differ(lambda spec: traced(tf.nn.softmax, spec))


def test_rows_of_tensorflows_own_softmax_differ():
    if not rows_that_differ(lambda spec: tf.function(tf.nn.softmax, input_signature=[spec]).get_concrete_function()):
        pytest.skip("on this processor every row of a softmax is computed alike")


class Compiled(layers.Layer):
    """Takes a mean in a function that it has compiled before."""

    def __init__(self):
        super().__init__()
        self.mean = tf.function(lambda x: tf.reduce_mean(x, 1), input_signature=[tf.TensorSpec([None, 7, 12])])
        self.mean.get_concrete_function()

    def call(self, x):
        return self.mean(x)

    def compute_output_shape(self, shape):
        return (shape[0], shape[2])


def powers():
    """Of each channel another one."""
    power = layers.Lambda(lambda x: tf.pow(tf.abs(x) + 1, tf.linspace(0.5, 2.0, 12)))
    return functional((12,), lambda x: head(power(layers.Dense(12)(x))))


UNEVEN = {
    "a function that was traced before": lambda: functional((7, 12), lambda x: head(Compiled()(x))),
    "powers of each channel": powers,
}


@pytest.mark.parametrize("build", UNEVEN.values(), ids=UNEVEN)
def test_operations_that_are_left_are_computed_for_one_unit_at_a_time(build):
    step = dp_sgd(build(), batch_size=BATCH)
    assert step.method == "in turn"


FOUND = {
    "a cross-entropy of shares": (lambda x: tf.nn.softmax_cross_entropy_with_logits(x, x), [16, 5]),
    "many classes": (lambda x: tf.nn.log_softmax(x), [16, 4097]),
    "an angle": (lambda x: tf.atan2(x, x[:, :1]), [16, 5]),
    "a product": (lambda x: tf.reduce_prod(x, 1), [16, 5, 3]),
    "a length": (lambda x: tf.raw_ops.EuclideanNorm(input=x, axis=1, keep_dims=False), [16, 5, 3]),
}
EVEN = {
    "few classes": (lambda x: tf.nn.log_softmax(x), [16, 4096]),
    "a cube": (lambda x: tf.pow(x, 3.0), [16, 5]),
    "a product of all": (lambda x: tf.reduce_prod(x, [1, 2]), [16, 5, 3]),
    "a sum over rows": (lambda x: tf.reduce_sum(x, 0), [16, 5, 3]),
    "whole numbers": (lambda x: tf.reduce_sum(tf.cast(x, tf.int32), 1), [16, 5, 3]),
}


@pytest.mark.parametrize(("function", "shape"), FOUND.values(), ids=FOUND)
def test_operations_that_are_not_replaced_are_found(function, shape):
    assert len(uneven_operations(traced(function, tf.TensorSpec(shape)).graph)) == 1


def test_a_softmax_that_was_traced_before_is_found():
    spec = tf.TensorSpec([16, 5])
    before = tf.function(tf.nn.softmax, input_signature=[spec]).get_concrete_function()
    assert len(uneven_operations(traced(before, spec).graph)) == 1


@pytest.mark.parametrize(("function", "shape"), EVEN.values(), ids=EVEN)
def test_others_are_not(function, shape):
    assert not uneven_operations(traced(function, tf.TensorSpec(shape)).graph)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a gate", "a wrapper", "a threshold"])
def test_what_was_replaced_is_right_in_a_model(name):
    model = NETWORKS[name][0]()
    x, y = batch(model, 5)
    assert relative_error(dp_sgd(model).clipped_sum(x, y, 0.1).sums, brute_force(model, x, y, 0.1)) < 1e-3


@pytest.mark.parametrize("target", [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32])
def test_casts_that_wrap_or_cut_by_place_are_found(target):
    """Of numbers out of range: an example moved the sum of 960 by 22.6 S."""
    assert uneven_operations(traced(lambda x: tf.cast(tf.cast(x, target), tf.float32), tf.TensorSpec([48, 3])).graph)


@pytest.mark.parametrize("target", [tf.int32, tf.int64, tf.bool, tf.float64])
def test_other_casts_are_the_same_at_every_place(target):
    """Of numbers out of range too."""
    casts = traced(lambda x: tf.cast(tf.cast(x, target), tf.float32), tf.TensorSpec([48, 3]))
    assert not uneven_operations(casts.graph)
    for bad in (-5.0, 300.0, 1e30, np.nan, np.inf):
        found = np.asarray(casts(tf.fill([48, 3], np.float32(bad))))
        assert np.array_equal(found, np.broadcast_to(found[0, 0], found.shape), equal_nan=True)
