"""A model with a layer or loss that is not known is computed one unit at a time: examples cannot mix.

In each of the networks a layer of one's own mixes the examples of a batch in a way that no trial shows.
"""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    as_if_known,
    batch,
    brute_force,
    dp_sgd,
    first_moves,
    functional,
    head,
    norm,
    relative_error,
)
from support import mostly_slow

from cloister.core.errors import UnsupportedModel
from cloister.privacy.dpsgd import checks
from cloister.privacy.dpsgd.clipped_sums import ClippedSums
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.known_layers import LOSSES_OF_EQUAL_RANKS, keeps_examples_apart
from cloister.privacy.dpsgd.strides import stride
from cloister.tasks import alzheimer_mri, digits, images, mnist

layers, ops = keras.layers, keras.ops
COUNT = max(stride(), 2)
"""Of examples: as many as a call has room for."""
pytestmark = pytest.mark.known_layers


class LargestScore(layers.Layer):
    """A softmax by hand that takes the largest score of the whole batch off: an axis was forgotten."""

    def call(self, scores):
        powers = tf.exp(scores - tf.reduce_max(scores))
        return tf.debugging.check_numerics(powers / tf.reduce_sum(powers, axis=-1, keepdims=True), "scores")


def attention():
    inner = (layers.Embedding(50, 1), layers.Flatten(), LargestScore())
    return keras.Sequential([keras.Input((8,), dtype="int32"), *inner, layers.Dense(3, activation="softmax")])


def large_scores(model):
    """The first text has so large a score that the others' are rounded otherwise, and the top amplifies roundings."""
    rng = np.random.default_rng(0)
    embedding, flat, scores, top = model.layers
    table = np.zeros((50, 1))
    table[1:9, 0], table[9, 0] = rng.uniform(-1, 0, 8), 60.0
    embedding.set_weights([table])
    x = np.array([[9] * 8] + [list(range(1, 9))] * (COUNT - 1), np.int32)
    beside, alone = (scores(flat(embedding(rows)))[-1].numpy().astype(float) for rows in (x, x[1:]))
    off, middle = beside - alone, (beside + alone) / 2
    kernel = 20 * off / (off @ off)
    bias = np.array([-40, -kernel @ middle, kernel @ middle])
    top.set_weights([np.stack([0 * kernel, kernel, -kernel], 1), bias])
    return x, np.zeros(COUNT, int), 1e-4


class ClippedGradient(layers.Layer):
    """Clips the gradient that passes it: an ordinary trick, by the norm of the whole batch."""

    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 5.0)

        return identity(x)


def clipped_within():
    inner = (layers.Dense(8, activation="relu"), ClippedGradient())
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(5, activation="softmax")])


def one_large_gradient(model):
    first, _, top = model.layers
    kernels = np.zeros((6, 8)), np.zeros((8, 5))
    kernels[0][0, 0], kernels[1][0, :2] = 1e-9, (5e5, -5e5)
    first.set_weights([kernels[0], np.zeros(8)])
    top.set_weights([kernels[1], np.array([13.8, 0, -30, -30, -30])])
    x, y = np.zeros((COUNT, 6), np.float32), np.zeros(COUNT, int)
    x[:, 0], y[0] = 0.1, 1
    return x, y, 1e-10


class LastToken(layers.Layer):
    """The state of a text's last token; of an empty text the last state of another text."""

    def call(self, states, tokens):
        length = ops.sum(ops.cast(tokens != 0, "int32"), axis=1)
        flat = ops.reshape(states, (-1, states.shape[2]))
        return ops.take(flat, ops.arange(ops.shape(states)[0]) * states.shape[1] + length - 1, axis=0)

    def compute_output_shape(self, states_shape, tokens_shape):
        return (states_shape[0], states_shape[2])


def last_token():
    tokens = keras.Input((12,), dtype="int32")
    states = layers.Dense(8, activation="tanh")(layers.Embedding(50, 8)(tokens))
    return keras.Model(tokens, layers.Dense(5, activation="softmax")(LastToken()(states, tokens)))


def empty_texts(model):
    """Beside the others an empty text has another gradient at the beginning of a call than behind another text."""
    embedding, dense, top = (layer for layer in model.layers if layer.trainable_variables)
    table = np.zeros((50, 8))
    table[1], table[2] = 5.0, -5.0
    embedding.set_weights([table])
    dense.set_weights([np.eye(8), np.zeros(8)])
    top.set_weights([np.outer(np.ones(8), [3, -3, 0, 0, 0]), np.zeros(5)])
    x = np.zeros((2 * COUNT - 1, 12), np.int32)
    x[0::2], x[-1] = 1, 2
    return x, np.full(len(x), 4), 1e-2


class AtPosition(layers.Layer):
    """The state at the position that a text names; behind its end the first state of the next text."""

    def call(self, states, positions):
        flat = tf.reshape(states, [-1, states.shape[2]])
        return tf.gather(flat, positions + tf.range(tf.shape(states)[0]) * states.shape[1])

    def compute_output_shape(self, states_shape, positions_shape):
        return (states_shape[0], states_shape[2])


def at_position():
    text = keras.Input((13,), dtype="int32")
    positions, tokens = layers.Lambda(lambda x: x[:, 0])(text), layers.Lambda(lambda x: x[:, 1:])(text)
    states = layers.Dense(8)(layers.Embedding(50, 8)(tokens))
    return keras.Model(text, layers.Dense(5, activation="softmax")(AtPosition()(states, positions)))


def positions_behind_the_end(model):
    """Of all texts but the last one. Without that the computation raises an exception, for every text."""
    x = np.full((COUNT, 13), 3, np.int32)
    x[:, 0], x[-1, 0] = 12, 0
    return x, np.zeros(COUNT, int), 1e-3


BREAKS = {
    "roundings": (attention, large_scores),
    "gradients": (clipped_within, one_large_gradient),
    "whole numbers": (last_token, empty_texts),
    "exceptions": (at_position, positions_behind_the_end),
}


def moves(name):
    """The step, and how far leaving out the first or the last example moves its sum, in S, at most."""
    build, choose = BREAKS[name]
    model = build()
    step = dp_sgd(model, batch_size=COUNT, probe=batch(model, 3))
    x, y, bound = choose(model)
    sums = [step.clipped_sum(x[part], y[part], bound).sums for part in (slice(None), slice(1, None), slice(-1))]
    far = [norm([a.astype(float) - b for a, b in zip(sums[0], other, strict=True)]) / bound for other in sums[1:]]
    return step, max(far)


@pytest.mark.parametrize("name", mostly_slow(BREAKS, ["gradients"]))
def test_one_example_moves_the_sum_by_the_bound_at_most(name):
    step, far = moves(name)
    assert 0 < far <= 1 and step._clipped_sums.places == 1


@pytest.mark.long
@pytest.mark.skipif(stride() == 1, reason="no number of examples suits this processor: each is computed alone")
@pytest.mark.parametrize("name", BREAKS)
def test_if_its_layer_was_thought_to_be_known_it_moves_it_by_more(name, monkeypatch):
    """No trial shows it, but for different examples beside each other, which show some."""
    monkeypatch.setattr(ClippedSums, "_are_same_beside_others", lambda self, calls, found: True)
    as_if_known(monkeypatch)
    step, far = moves(name)
    assert far > 1.2 and step._clipped_sums.same_at_every_place


class Bins(layers.Layer):
    """Of the second half of a text's numbers the sums in bins, which the first half names."""

    def call(self, x):
        half = x.shape[1] // 2
        sums = (tf.math.unsorted_segment_sum(tf.cast(row[half:], tf.float32), row[:half], 4) for row in tf.unstack(x))
        return tf.stack(list(sums))

    def compute_output_shape(self, shape):
        return (shape[0], 4)


def fifth_bins(monkeypatch, together):
    """How far a text that names a bin that there is none of moves the sum, in S."""
    if together:
        monkeypatch.setattr(checks, "partial", lambda make, *given, one_at_a_time: partial(make, *given))
        monkeypatch.setattr(checks, "_by_layer", lambda make, trials: None)
    model = functional((128,), lambda x: layers.Dense(3, activation="softmax")(Bins()(x)), "int32")
    step = dp_sgd(model, batch_size=COUNT)
    model.set_weights([np.zeros((4, 3)), np.zeros(3)])
    x = np.zeros((COUNT, 128), np.int32)
    x[0, :64], x[:, 64:] = 4 * np.minimum(np.arange(1, 65), COUNT - 1), 100  # the fifth bin is the next text's first
    x[0, 64:] = np.where(np.arange(64) < COUNT - 1, -(10**6), 0)
    return step, first_moves(step, x, np.zeros(COUNT, int))


@pytest.mark.slow
def test_one_example_names_nothing_of_another(monkeypatch):
    step, far = fifth_bins(monkeypatch, together=False)
    assert far <= 1 and step._clipped_sums.places == 1


@pytest.mark.slow
@pytest.mark.skipif(stride() == 1, reason="no number of examples suits this processor: each is computed alone")
def test_vectorised_together_it_would(monkeypatch):
    step, far = fifth_bins(monkeypatch, together=True)
    assert far > 2 and step._clipped_sums.same_at_every_place


def between(*inner, shape=(6, 4)):
    return keras.Sequential([keras.Input(shape), *inner, layers.Flatten(), layers.Dense(3, activation="softmax")])


class MyDense(layers.Dense):
    """Anybody's."""


def over_examples():
    """A model that takes a number for each example. Keras takes an axis from what it is given, and the softmax is over
    the examples."""
    inputs = keras.Input(())
    return keras.Model(inputs, layers.Reshape((1,))(layers.Softmax()(inputs)))


def sum_of_two():
    """For two tensors of six numbers. Keras calls it for one of six and one of a single number too."""
    inputs = [keras.Input((6,)), keras.Input((6,))]
    return keras.Model(inputs, layers.Add()(inputs))


def quantized(model):
    model.quantize("int8")
    return model


def two_branches(merging, first, second):
    """Two branches of one input, merged."""
    return functional((4, 6), lambda x: head(layers.Flatten()(merging([first(x), second(x)]))))


def merged_before(merging):
    """By a layer that was made for tensors of one rank."""

    def inner(x):
        same = merging([x, x])
        return head(merging([x, layers.GlobalMaxPooling1D()(same)]))

    return functional((4, 6), inner)


def built_before(x):
    """By a layer that was built for another rank before it is called."""
    scale = layers.Normalization(axis=1, mean=[0.0], variance=[1.0])
    scale.build((None, 6))
    return head(scale(x))


def normalised_before(x):
    """By a layer that was made for another rank."""
    shared = layers.Normalization(axis=1, mean=[0.0], variance=[1.0])
    return head(layers.Flatten()(shared(layers.Reshape((1, 6))(shared(layers.GlobalMaxPooling1D()(x))))))


KNOWN = {
    "pictures": lambda: between(layers.Conv2D(3, 2, activation="relu"), layers.MaxPooling2D(), shape=(8, 8, 1)),
    "a normalisation": lambda: between(layers.LayerNormalization(), layers.Dropout(0.5)),
    "within a wrapper": lambda: between(layers.TimeDistributed(layers.Dense(3))),
    "both directions": lambda: between(layers.Bidirectional(layers.LSTM(3, unroll=True, return_sequences=True))),
    "attention": lambda: functional((6, 4), lambda x: head(layers.Flatten()(layers.MultiHeadAttention(2, 3)(x, x)))),
    "nested": lambda: between(keras.Sequential([keras.Input((6, 4)), layers.Dense(3)])),
    "a residual": lambda: two_branches(layers.Add(), layers.Dense(6), layers.ReLU()),
    "scaled": lambda: between(layers.Rescaling(2.0, offset=1)),
    "an activation that is a layer": lambda: between(layers.Dense(3, activation=layers.LeakyReLU())),
}


def masked(pool):
    """A mean of three positions, with a mask for all examples."""
    return functional((3, 4), lambda x: head(pool(x, mask=np.ones((1, 3), bool))))


def inner_pool():
    inputs = keras.Input((3, 4))
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(inputs))


def recurrent_of_its_own():
    recurrent = layers.SimpleRNN(3)
    call = recurrent.cell.call
    recurrent.cell.call = lambda *given, **options: call(*given, **options)
    return recurrent


def with_a_call_of_its_own(layer):
    layer.call = lambda x: x
    return layer


UNKNOWN = {
    "a layer with a call of its own": lambda: between(with_a_call_of_its_own(layers.Identity())),
    "an activation with a call of its own": lambda: between(
        layers.Dense(3, activation=with_a_call_of_its_own(layers.ReLU()))
    ),
    "a cell with a call of its own": lambda: functional((6, 4), lambda x: head(recurrent_of_its_own()(x))),
    "an array that is given by name": lambda: masked(layers.GlobalAveragePooling1D()),
    "an array that is given to an inner model by name": lambda: masked(inner_pool()),
    "a layer of one's own": lambda: between(LargestScore()),
    "a subclass": lambda: between(MyDense(3)),
    "a function": lambda: between(layers.Lambda(lambda x: x + 1)),
    "an activation of one's own": lambda: between(layers.Dense(3, activation=tf.nn.l2_normalize)),
    "an operation between layers": lambda: functional((6, 4), lambda x: head(layers.Flatten()(x[:, ::-1]))),
    "the axis of examples": lambda: between(layers.Softmax(axis=0)),
    "perhaps the axis of examples": lambda: between(layers.UnitNormalization(axis=-3)),
    "numbers without an axis of their own": lambda: functional((), lambda x: head(layers.Reshape((1,))(x))),
    "no axis but that of examples": lambda: functional(
        (1,), lambda x: head(layers.Reshape((1,))(layers.Softmax()(layers.Reshape(())(x))))
    ),
    "an inner model of single numbers": lambda: functional((1,), lambda x: head(over_examples()(x))),
    "numbers of 8 bits": lambda: quantized(between(layers.Dense(3))),
    "within a wrapper": lambda: between(layers.TimeDistributed(MyDense(3))),
    "in one direction": lambda: between(layers.Bidirectional(layers.RNN(layers.GRUCell(3), return_sequences=True))),
    "nested": lambda: between(keras.Sequential([keras.Input((6, 4)), MyDense(3)])),
    "attention over examples": lambda: functional((6,), lambda x: head(layers.Attention()([x, x]))),
    "a number for each example, which Keras may take for a bias": lambda: two_branches(
        layers.Add(), layers.GlobalMaxPooling1D(), lambda x: layers.Dense(1)(layers.Flatten()(x))
    ),
    "a difference of two ranks": lambda: merged_before(layers.Subtract()),
    "a normalisation for two ranks": lambda: functional((4, 6), normalised_before),
    "a layer that was built for another rank": lambda: functional((4, 6), built_before),
    "lengths that are not known": lambda: functional(
        (None, 6), lambda x: head(layers.GlobalMaxPooling1D()(layers.Add()([x, layers.ReLU()(x)])))
    ),
    "an activation that adds an axis": lambda: between(layers.Dense(4, activation=layers.Reshape((1, 24)))),
    "an activation that makes a mask": lambda: between(layers.Activation(layers.Masking(5.0))),
    "a scale with axes of its own": lambda: between(layers.Rescaling(np.ones((1, 1, 1, 1), np.float32))),
    "a mask that an inner model makes": lambda: between(
        keras.Sequential([keras.Input((6, 4)), layers.Masking()]), layers.TimeDistributed(layers.Flatten())
    ),
    "a mask of words": lambda: functional((6,), lambda x: head(layers.Embedding(5, 4, mask_zero=True)(x)), "int32"),
    "an inner model that is given a narrower input": lambda: functional(
        (6,), lambda x: head(sum_of_two()([x, layers.Dense(1)(x)]))
    ),
    "a model for each step": lambda: between(
        layers.TimeDistributed(keras.Sequential([keras.Input((4,)), layers.Dense(2)])),
    ),
    "attention over pictures": lambda: functional(
        (2, 3, 4), lambda x: head(layers.Flatten()(layers.MultiHeadAttention(1, 2, attention_axes=(1, 2))(x, x)))
    ),
    "attention of several ranks": lambda: functional(
        (6, 4), lambda x: head(layers.Flatten()(layers.Attention()([x, layers.Reshape((1, 6, 4))(x)])))
    ),
    "a mask for attention": lambda: functional(
        (6, 4),
        lambda x: head(
            layers.Flatten()(layers.MultiHeadAttention(1, 2)(x, x, attention_mask=layers.GlobalMaxPooling1D()(x)))
        ),
    ),
    "a mask": lambda: functional(
        (6, 4), lambda x: head(layers.GlobalAveragePooling1D()(x, layers.Reshape((6,))(layers.Dense(1)(x))))
    ),
    "a state": lambda: functional(
        (6, 4), lambda x: head(layers.GRU(4)(x, initial_state=layers.GlobalMaxPooling1D()(x)))
    ),
    "a layer for any equation": lambda: between(layers.EinsumDense("abc,cd->abd", (6, 3))),
}


@pytest.mark.parametrize("build", KNOWN.values(), ids=KNOWN)
def test_what_is_known(build):
    assert keeps_examples_apart(build(), LOSS, 1)


SHIPPED = {
    "digits": digits._mlp,
    "mnist, mlp": mnist._mlp,
    "mnist, cnn": mnist._cnn,
    "emnist": partial(images._two_convolutions, 62),
    "alzheimer-mri": partial(alzheimer_mri._cnn, (32, 32, 1)),
}


@pytest.mark.parametrize("build", SHIPPED.values(), ids=SHIPPED)
def test_the_networks_of_tasks_are_known(build):
    """Each would be many times slower."""
    assert keeps_examples_apart(build(), LOSS, 1)


@pytest.mark.parametrize("build", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known(build):
    assert not keeps_examples_apart(build(), LOSS, 1)


def test_a_loss_of_ones_own_is_not_known():
    assert not keeps_examples_apart(between(), lambda y, outputs: LOSS(y, outputs), 1)


@pytest.mark.parametrize("loss", [keras.losses.hinge, keras.losses.squared_hinge])
def test_a_loss_that_looks_at_the_labels_of_all_examples_is_not_known(loss):
    labels, outputs = np.array([[0.0], [-1.0]], np.float32), np.full((2, 1), 0.5, np.float32)
    assert loss(labels, outputs)[0] != loss(labels[:1], outputs[:1])[0]
    assert not keeps_examples_apart(between(), loss, 1)


@pytest.mark.parametrize("loss", LOSSES_OF_EQUAL_RANKS)
def test_a_loss_that_repeats_labels_is_known_where_they_have_the_axes_of_outputs(loss):
    assert keeps_examples_apart(between(), loss, 2) and not keeps_examples_apart(between(), loss, 1)


def test_a_loss_that_repeats_labels_is_refused():
    model = functional((4,), layers.Dense(1, activation="softplus"))
    with pytest.raises(UnsupportedModel, match="the loss"):
        dp_sgd(model, loss=keras.losses.poisson, probe=(np.ones((3, 4), np.float32), np.ones(3, np.float32)))


@pytest.mark.parametrize("name", mostly_slow(["roundings", "gradients"], ["gradients"]))
def test_different_examples_beside_each_other_show_some(name, monkeypatch):
    as_if_known(monkeypatch)
    step, far = moves(name)
    assert far <= 1 and not step._clipped_sums.same_at_every_place


def with_a_number(features):
    """Adds a number to all features of an example. Keras takes it for a bias of the batch if there are as many."""
    inputs = keras.Input((4,))
    wide, one = layers.Dense(features)(inputs), layers.Dot(axes=1)([inputs, inputs])
    return keras.Model(inputs, head(layers.Add()([wide, one])))


def moved_by_a_number(monkeypatch, is_known):
    """The step, and how far one example moves its sum, in S."""
    if is_known:
        as_if_known(monkeypatch)
    model = with_a_number(COUNT)
    step = dp_sgd(model, batch_size=COUNT)
    wide, top = (layer for layer in model.layers if layer.trainable_variables)
    wide.set_weights([np.zeros((4, COUNT)), np.full(COUNT, -1.0)])
    top.set_weights([np.tile([1.0, -1.0, 0.0, 0.0, 0.0], (COUNT, 1)), np.zeros(5)])
    x, y = np.full((COUNT, 4), 0.1, np.float32), np.full(COUNT, 2)
    x[0] = 100
    one, other = (step.clipped_sum(x[part], y[part], 1.0).sums for part in (slice(None), slice(1, None)))
    return step, norm([a.astype(float) - b for a, b in zip(one, other, strict=True)])


def test_a_number_for_each_example_moves_the_sum_by_the_bound_at_most(monkeypatch):
    _, far = moved_by_a_number(monkeypatch, is_known=False)
    assert 0 < far <= 1


@pytest.mark.skipif(stride() == 1, reason="no number of examples suits this processor: each is computed alone")
@pytest.mark.slow
def test_different_examples_beside_each_other_show_that_it_is_mixed(monkeypatch):
    """Keras does so for as many examples as the call has room for, and for none of the fewer ones of other trials."""
    step, far = moved_by_a_number(monkeypatch, is_known=True)
    assert far <= 1 and step._clipped_sums.places == 1
    monkeypatch.setattr(ClippedSums, "_are_same_beside_others", lambda self, calls, found: True)
    step, far = moved_by_a_number(monkeypatch, is_known=True)
    assert far > 2 and step._clipped_sums.places == COUNT


def large_pictures(activation):
    inner = (layers.Conv2D(3, 3, activation=activation), layers.MaxPooling2D(4))
    return between(*inner, shape=(60, 60, 1))


ALONE = {"a layer": lambda: between(MyDense(3)), "large pictures": lambda: large_pictures(tf.nn.softplus)}


@pytest.mark.parametrize("build", mostly_slow(ALONE.values(), [ALONE["a layer"]]))
def test_what_is_computed_one_unit_at_a_time_has_right_sums(build):
    model = build()
    x, y = batch(model, 5)
    step = dp_sgd(model)
    assert relative_error(step.clipped_sum(x, y, 0.1).sums, brute_force(model, x, y, 0.1)) < 1e-4
    assert step._clipped_sums.places == 1


def test_without_rows_one_unit_is_computed_at_a_time_too():
    model = between(MyDense(3))
    assert Gradients(model, LOSS, by_layer=True, one_at_a_time=True).without_rows().one_at_a_time
