"""What a graph could carry from one example to the next is refused, or is each example's own."""

import keras
import pytest
import tensorflow as tf
from examples_of_dpsgd import dp_sgd, functional
from support import failures

from cloister.utils.arrays import is_seed
from cloister.utils.errors import UnsupportedModel

layers = keras.layers


class LargestSeen(keras.Layer):
    """Learns from examples of a kind that made-up ones are not of."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        def learn():
            self.seen.assign(keras.ops.max(x))
            return x * self.seen

        return tf.cond(tf.reduce_any(x > 1e30), learn, lambda: x)


class InPython(keras.Layer):
    """Computes in Python, where it could keep anything."""

    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(lambda numbers: numbers, [x], x.dtype, stateful=False), x.shape)


class Remembering(keras.Layer):
    """Remembers in a table that it makes anew in each call, it seems: TensorFlow gives it the old one."""

    def call(self, x):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        key = tf.constant(1, tf.int64)
        large = tf.reduce_any(x > 1e30)
        added = tf.cond(large, lambda: tf.group(table.insert(key, 1.0)), tf.no_op)
        with tf.control_dependencies([added]):
            return x + table.lookup(key)


class LookingUp(keras.Layer):
    """Reads a table that outlives a call. That it only reads it cannot be seen."""

    def __init__(self):
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def call(self, x):
        return x + tf.ensure_shape(self.table.lookup(tf.constant(1, tf.int64)), ())


class InPlace(keras.Layer):
    """Changes a constant of the graph, which later calls see: TensorFlow counts it as stateless."""

    def call(self, x):
        one = tf.reduce_max(x, axis=-1, keepdims=True)[:1]
        return x + tf.raw_ops.InplaceAdd(x=tf.zeros([1, 1]), i=[0], v=0 * one)


class Files(keras.Layer):
    """Writes a file where an example is large, or counts files: TensorFlow takes both for stateless."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes

    def call(self, x):
        large = tf.reduce_any(x > 1e30)
        if self.writes:

            def write():
                return tf.raw_ops.DebugIdentity(input=tf.reduce_max(x), debug_urls=["file:///nowhere"])

            return x + tf.cond(large, write, lambda: tf.zeros([]))
        pattern = tf.strings.join(["/nowhere/", tf.where(large, "?", "*")])  # a constant would be folded
        return x + tf.cast(tf.size(tf.raw_ops.MatchingFiles(pattern=pattern)), x.dtype)


class Crops(keras.Layer):
    """Its gradient is added up in the order in which threads come."""

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        boxes = tf.tile([[0.0, 0.0, 1.0, 1.0]], [3, 1])
        pictures = tf.tile(tf.reshape(x, (-1, 1, 3, 1)), [1, 3, 1, 1])
        crops = [tf.image.crop_and_resize(one[None], boxes, [0, 0, 0], [1, 3]) for one in tf.unstack(pictures)]
        return tf.reshape(tf.stack([tf.reduce_mean(own, axis=0) for own in crops]), (-1, 3))


class SeedWriter(keras.Layer):
    """Writes the state that its dropout draws from."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def call(self, x):
        state = self.dropout.seed_generator.state
        state.assign(tf.where(tf.reduce_any(x > 1e30), tf.fill([2], 77), tf.cast(state.value, tf.int32)))
        return tf.where(tf.cast(state.value, tf.int32)[0] == 77, -x, x)


class FixedSeed(keras.Layer):
    """Draws from a state of TensorFlow's own, which one example more moves on for all later ones."""

    def call(self, x):
        drawn = tf.cond(tf.reduce_any(x > 1e30), lambda: tf.random.uniform([], seed=5), lambda: tf.zeros([]))
        return x + drawn


class Hidden(keras.Layer):
    """Keeps a variable that Keras does not know of."""

    def __init__(self):
        super().__init__()
        self.box = [tf.Variable(1.0)]

    def call(self, x):
        return x * self.box[0]


def network(layer, trainable=True):
    """A dense layer, one that is tried, and a dense layer."""

    def inner(x):
        before = layers.Dense(3, activation="tanh", trainable=trainable)(x)
        return layers.Dense(5, activation="softmax")(layer(before))

    return functional((6,), inner)


REFUSED = {
    "changes while training: state learnt": lambda: network(LargestSeen()),
    "PyFuncStateless, which could keep": lambda: network(InPython(), trainable=False),
    "MutableHashTableV2, which could keep": lambda: network(Remembering()),
    "LookupTableFindV2, which could keep": lambda: network(LookingUp()),
    "InplaceAdd, which could keep": lambda: network(InPlace(), trainable=False),
    "RandomUniform, which could keep": lambda: network(FixedSeed()),
    "DebugIdentity.*, which could keep": lambda: network(Files(writes=True), trainable=False),
    "MatchingFiles, which could keep": lambda: network(Files(writes=False), trainable=False),
    "CropAndResizeGradImage, which TensorFlow adds up in another order": lambda: network(Crops()),
    "a variable that Keras does not know": lambda: network(Hidden()),
}


@pytest.mark.parametrize("reasons", [list(REFUSED)[:2], pytest.param(list(REFUSED)[2:], marks=pytest.mark.slow)])
def test_it_is_refused(reasons):
    def check(reason):
        with pytest.raises(UnsupportedModel, match=reason):
            dp_sgd(REFUSED[reason]())

    assert not failures(reasons, check)


def test_a_layer_that_writes_the_state_of_a_dropout_by_all_examples_is_refused():
    model = functional((6,), lambda x: layers.Dense(5, activation="softmax")(SeedWriter()(x)))
    with pytest.raises(UnsupportedModel, match="takes the examples of a batch together"):
        dp_sgd(model)


def test_a_weight_that_is_named_like_a_state_is_none():
    named = layers.Layer().add_weight(shape=(2,), name="seed_generator_state")
    assert named.path.endswith("seed_generator_state")
    assert not is_seed(named) and is_seed(layers.Dropout(0.5).seed_generator.state)
