"""Models whose layers mix examples where no trial would show it: refused, computed in turn, or proved harmless.

The first ones come with weights and inputs by which one example moved the sum by 2 to 80 times the bound, in versions
that knew layers by lists and tried models on made-up examples.
"""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    BatchMean,
    batch,
    brute_force,
    compile_nothing,
    dp_sgd,
    functional,
    head,
    moved,
    relative_error,
    small,
)
from support import failures

from cloister.tasks.datasets.alzheimer_mri import mri_network
from cloister.tasks.datasets.characters import convolutional_network, digits_mlp, mnist_cnn, mnist_mlp
from cloister.utils.errors import UnsupportedModel

layers, ops = keras.layers, keras.ops
COUNT = 16


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


class Bins(layers.Layer):
    """Of the second half of a text's numbers the sums in bins, which the first half names."""

    def call(self, x):
        half = x.shape[1] // 2
        sums = (tf.math.unsorted_segment_sum(tf.cast(row[half:], tf.float32), row[:half], 4) for row in tf.unstack(x))
        return tf.stack(list(sums))

    def compute_output_shape(self, shape):
        return (shape[0], 4)


def bins():
    return functional((128,), lambda x: layers.Dense(3, activation="softmax")(Bins()(x)), "int32")


def a_fifth_bin(model):
    """Which there is none of: it was the next text's first."""
    model.set_weights([np.zeros((4, 3)), np.zeros(3)])
    x = np.zeros((COUNT, 128), np.int32)
    x[0, :64], x[:, 64:] = 4 * np.minimum(np.arange(1, 65), COUNT - 1), 100
    x[0, 64:] = np.where(np.arange(64) < COUNT - 1, -(10**6), 0)
    return x, np.zeros(COUNT, int), 1.0


def with_a_number():
    """Adds a number to all features of an example. Keras takes it for a bias of the batch if there are as many."""
    inputs = keras.Input((4,))
    wide, one = layers.Dense(COUNT)(inputs), layers.Dot(axes=1)([inputs, inputs])
    return keras.Model(inputs, head(layers.Add()([wide, one])))


def one_large_number(model):
    wide, top = (layer for layer in model.layers if layer.trainable_variables)
    wide.set_weights([np.zeros((4, COUNT)), np.full(COUNT, -1.0)])
    top.set_weights([np.tile([1.0, -1.0, 0.0, 0.0, 0.0], (COUNT, 1)), np.zeros(5)])
    x = np.full((COUNT, 4), 0.1, np.float32)
    x[0] = 100
    return x, np.full(COUNT, 2), 1.0


def mean_of_all(threshold=1e12):
    """A mask with an axis too many: the mean is over all examples, and attention repeats it for each."""

    def inner(x):
        row, large = layers.Reshape((1, 4)), layers.ReLU(threshold=threshold)(x)
        mean = layers.GlobalAveragePooling1D()(row(large), mask=np.ones((1, 1, 1), bool))
        seen = layers.Attention()([row(x), layers.Reshape((1, 4))(mean)])
        return layers.Dense(3, activation="softmax", name="top")(layers.Add()([x, layers.Flatten()(seen)]))

    return functional((4,), inner)


def numbers_out_of_reach(model):
    """Of any trial."""
    kernel = np.zeros((4, 3))
    kernel[:2] = [[1e-10, -1e-10, 0.0], [-9.0, 9.0, 0.0]]
    model.get_layer("top").set_weights([kernel, np.zeros(3)])
    x = np.zeros((16, 4), np.float32)
    x[1:, 1], x[0] = 1.0, [1e13, 0.0, 0.0, 0.0]
    return x, np.full(16, 2), 1.0


BREAKS = {
    "roundings": (attention, large_scores),
    "gradients": (clipped_within, one_large_gradient),
    "whole numbers": (last_token, empty_texts),
    "exceptions": (at_position, positions_behind_the_end),
    "bins": (bins, a_fifth_bin),
    "a number for each example": (with_a_number, one_large_number),
    "a mean of all": (mean_of_all, numbers_out_of_reach),
}


def moves(name):
    """How far leaving out the first or the last example moves the sum, in S, at most; 0 for a refused model."""
    build, choose = BREAKS[name]
    model = build()
    try:
        step = dp_sgd(model, batch_size=COUNT, probe=batch(model, 3))
    except UnsupportedModel:
        return 0.0
    x, y, bound = choose(model)
    return max(moved(step, x, y, bound, leaving) for leaving in (0, len(x) - 1))


def test_one_example_moves_the_sum_by_the_bound_at_most():
    def one(name):
        assert moves(name) <= 1

    assert not failures(BREAKS, one)


class FromTheOneBefore(keras.Layer):
    """Couples each example with the one in front of it: the first one with none."""

    def call(self, x):
        return x + keras.ops.concatenate([keras.ops.zeros_like(x[:1]), x[:-1]])


class CoupledByWeight(keras.Layer):
    """Couples examples as far as a weight says, which a server sends, whether it is trained or not."""

    def __init__(self, trained=True):
        super().__init__()
        self.trained = trained

    def build(self, shape):
        self.share = self.add_weight(shape=(1,), initializer="zeros", name="share", trainable=self.trained)

    def call(self, x):
        return x + keras.ops.relu(self.share) * keras.ops.mean(x, axis=0, keepdims=True)


class LogMean(layers.Layer):
    """Has no number for half of what is given to it."""

    def call(self, x):
        return keras.ops.log(x) - keras.ops.mean(keras.ops.log(x), axis=0, keepdims=True)


def centred(x):
    """By operations that are no layers."""
    return x - keras.ops.mean(x, axis=0, keepdims=True)


MIXING = {
    "BatchMean": BatchMean,
    "CoupledByWeight": CoupledByWeight,
    "UnitNormalization": lambda: layers.UnitNormalization(axis=0),
    "Softmax": lambda: layers.Softmax(axis=0),
    "LogMean": LogMean,
    "the model or its loss": lambda: centred,
}


def test_a_layer_that_mixes_examples_is_refused_by_its_name():
    """A server's weights or made-up examples may hide it: the proof looks at neither."""

    def one(name):
        with pytest.raises(UnsupportedModel, match=f"{name}.* takes the examples of a batch together"):
            dp_sgd(small(layers.Dense(4), MIXING[name]()))

    assert not failures(MIXING, one)


def test_a_layer_of_which_the_proof_cannot_tell_is_computed_in_turn(monkeypatch):
    compile_nothing(monkeypatch)
    assert dp_sgd(small(layers.Dense(4), FromTheOneBefore())).method == "in turn"


def test_a_loss_that_mixes_examples_is_refused():
    def capped(y, p):
        losses = LOSS(y, p)
        return ops.minimum(losses, 5 * ops.mean(losses))

    model = small(layers.Dense(4))
    with pytest.raises(UnsupportedModel, match="the model or its loss takes the examples"):
        dp_sgd(model, loss=capped, probe=batch(model, 3))


def between(*inner, shape=(6, 4)):
    return keras.Sequential([keras.Input(shape), *inner, layers.Flatten(), layers.Dense(3, activation="softmax")])


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


def normalised_before(x):
    """By a layer that was made for another rank."""
    shared = layers.Normalization(axis=1, mean=[0.0], variance=[1.0])
    return head(layers.Flatten()(shared(layers.Reshape((1, 6))(shared(layers.GlobalMaxPooling1D()(x))))))


def masked(pool):
    """A mean of three positions, with a mask for all examples."""
    return functional((3, 4), lambda x: head(pool(x, mask=np.ones((1, 3), bool))))


def pairs(own, of_each):
    """The largest difference of something of each example and of something that is said to have one row for each.

    If that has one row more in front, or none, Keras gives all differences of two examples, and says nothing.
    """

    def inner(x):
        row = layers.Reshape((1, 4))(layers.Dense(4)(x))
        difference = layers.Subtract()([own(x), of_each(row)])
        return layers.Dense(3, activation="softmax")(layers.GlobalMaxPooling1D()(difference))

    return functional((4,), inner)


def with_an_axis_in_front(layer):
    return pairs(layer, layers.Identity())


def for_two_ranks():
    shared = layers.Normalization(axis=1, mean=[0.0], variance=[1.0])
    shared.build((None, 1, 4))
    return pairs(shared, shared)


def reshaping_activations(x):
    row = layers.Activation(layers.Reshape((1, 4)))(layers.Dense(4)(x))
    largest = layers.Activation(layers.GlobalMaxPooling1D())(layers.Subtract()([x, row]))
    return layers.Dense(3, activation="softmax")(largest)


IN_ROWS = {
    "a normalisation": lambda: between(layers.LayerNormalization(), layers.Dropout(0.5)),
    "nested": lambda: between(keras.Sequential([keras.Input((6, 4)), layers.Dense(3)])),
    "a residual": lambda: two_branches(layers.Add(), layers.Dense(6), layers.ReLU()),
    "scaled": lambda: between(layers.Rescaling(2.0, offset=1)),
    "an activation that is a layer": lambda: between(layers.Dense(3, activation=layers.LeakyReLU())),
    "digits": digits_mlp,
    "mnist, mlp": mnist_mlp,
    "pictures": lambda: between(layers.Conv2D(3, 2, activation="relu"), layers.MaxPooling2D(), shape=(8, 8, 1)),
    "mnist, cnn": mnist_cnn,
    "emnist": partial(convolutional_network, 62),
    "alzheimer-mri": partial(mri_network, (32, 32, 1)),
}


@pytest.mark.slow(minutes=1)
def test_layers_of_keras_are_computed_in_rows():
    def one(name):
        assert dp_sgd(IN_ROWS[name]()).method == "rows"

    assert not failures(IN_ROWS, one)


ODD = {
    "an array that is given by name": lambda: masked(layers.GlobalAveragePooling1D()),
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
    "in one direction": lambda: between(layers.Bidirectional(layers.RNN(layers.GRUCell(3), return_sequences=True))),
    "attention over examples": lambda: functional((6,), lambda x: head(layers.Attention()([x, x]))),
    "a number for each example, which Keras may take for a bias": lambda: two_branches(
        layers.Add(), layers.GlobalMaxPooling1D(), lambda x: layers.Dense(1)(layers.Flatten()(x))
    ),
    "a difference of two ranks": lambda: merged_before(layers.Subtract()),
    "a normalisation for two ranks": lambda: functional((4, 6), normalised_before),
    "a scale with axes of its own": lambda: between(layers.Rescaling(np.ones((1, 1, 1, 1), np.float32))),
    "a mask that an inner model makes": lambda: between(
        keras.Sequential([keras.Input((6, 4)), layers.Masking()]), layers.TimeDistributed(layers.Flatten())
    ),
    "a mask of words": lambda: functional((6,), lambda x: head(layers.Embedding(7, 4, mask_zero=True)(x)), "int32"),
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


OTHERWISE = {
    "a row for all examples": mean_of_all,
    "a scale with axes of its own": lambda: with_an_axis_in_front(layers.Rescaling(np.ones((1, 1, 1), np.float32))),
    "a layer that was built for another rank": for_two_ranks,
    "an activation that adds an axis": lambda: functional((4,), reshaping_activations),
    "a narrower input": lambda: functional(
        (6,), lambda x: layers.Dense(3, activation="softmax")(sum_of_two()([x, layers.Dense(1)(x)]))
    ),
}


@pytest.mark.slow(minutes=1)
def test_what_is_odd_is_right_or_refused():
    """Sums are those of Keras alone, one example at a time."""

    def one(name):
        keras.utils.set_random_seed(0)
        model = (ODD | OTHERWISE)[name]()
        x, y = batch(model, 3)
        try:
            step = dp_sgd(model, probe=(x, y))
        except UnsupportedModel:
            return
        assert relative_error(step.clipped_sum(x, y, 0.1).sums, brute_force(model, x, y, 0.1)) < 1e-3

    assert not failures(ODD | OTHERWISE, one)


class InALoop(layers.Layer):
    """A dense layer that is called once a step of a loop: the gradient of what it gives is hidden from the outside."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return tf.while_loop(lambda k, h: k < 3, lambda k, h: (k + 1, self.dense(h)), (0, x))[1]


def test_a_layer_within_a_loop_is_trained():
    model = small(layers.Dense(4), InALoop())
    x, y = batch(model, 5)
    assert relative_error(dp_sgd(model).clipped_sum(x, y, 0.1).sums, brute_force(model, x, y, 0.1)) < 5e-4


class TracedBefore(layers.Layer):
    """Multiplies by a weight in a function that was compiled before DP-SGD begins."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")
        self.compiled = tf.function(lambda x: x * self.scale, input_signature=[tf.TensorSpec([None, *shape[1:]])])
        self.compiled.get_concrete_function()

    def call(self, x):
        return self.compiled(x)


def test_a_weight_that_is_read_past_dp_sgd_is_refused():
    """Its gradient would be taken for zero, and it would not be trained."""
    with pytest.raises(UnsupportedModel, match="is read by a function that was traced before"):
        dp_sgd(small(layers.Dense(4), TracedBefore()))


def test_indices_below_zero_count_from_the_end():
    model = functional((3,), lambda x: head(layers.Flatten()(layers.Embedding(7, 2)(x))), "int32")
    x, y = np.array([[-1, 2, -7], [0, 1, 6]], np.int32), np.array([0, 1])
    step = dp_sgd(model)
    assert relative_error(step.clipped_sum(x, y, 0.1).sums, brute_force(model, x, y, 0.1)) < 5e-4
    assert "embedding" in step.kernels.values()


def test_a_model_of_ones_own_layer_has_right_sums():
    model = between(LargestScore(), layers.Dense(3))
    x, y = batch(model, 5)
    assert relative_error(dp_sgd(model).clipped_sum(x, y, 0.1).sums, brute_force(model, x, y, 0.1)) < 5e-4
