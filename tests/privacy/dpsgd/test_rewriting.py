"""Graphs whose sums of several terms TensorFlow would add up in any order, once they are large."""

from contextlib import contextmanager, nullcontext, suppress

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import batch, dp_sgd, moved
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

from cloister.privacy.dpsgd import batches, in_rows
from cloister.privacy.dpsgd.tracing import PASSES, as_traced

layers = keras.layers


def quintic(x):
    """Its derivative is zero at 1, and there nothing but roundings of its terms."""
    return x - 2 / 3 * x * x * x + 0.2 * x * x * x * x * x


def network():
    """With weights by which these roundings are an example's whole gradient."""
    keras.utils.set_random_seed(5)
    filters = 32
    first = layers.Dense(filters, activation=quintic)
    second = layers.Conv2D(5, 3, strides=4, activation=tf.sin, trainable=False)
    rest = (layers.MaxPooling2D(1), layers.Flatten(), layers.Dense(5, activation="softmax"))
    model = keras.Sequential([keras.Input((28, 28, 1)), first, second, *rest])
    rng, one = np.random.default_rng(189), np.float32(1)
    biases, ulp = rng.standard_normal(5), np.spacing(one)

    def steep():
        second.set_weights([2.0**39 * rng.standard_normal(second.kernel.shape), biases])
        off = ulp * rng.integers(-100, 100, filters)
        first.set_weights([20 * ulp * rng.standard_normal(first.kernel.shape), (one + off).astype(np.float32)])

    return model, steep


@contextmanager
def kinds_of_operations():
    """Those of the graphs that are run for the first time in the block, as TensorFlow has rewritten them."""
    own, found = context.context(), set()
    own.enable_run_metadata()
    try:
        yield found
        graphs = own.export_run_metadata().function_graphs
        found |= {node.op for graph in graphs for node in graph.post_optimization_graph.node}
    finally:
        own.disable_run_metadata()


@pytest.mark.slow
@pytest.mark.parametrize("rewritten", [False, True])
def test_a_sum_of_terms_is_added_up_in_one_order(rewritten, monkeypatch):
    monkeypatch.setattr(in_rows, "USUAL", 1 << 20)  # one round: TensorFlow rewrites no loop
    monkeypatch.setattr(batches, "CACHE", 1 << 40)
    if rewritten:
        monkeypatch.setattr(in_rows, "as_traced", nullcontext)
    model, steep = network()
    with kinds_of_operations() as kinds:
        step, (x, y) = dp_sgd(model, batch_size=400), batch(model, 20, seed=2)
        steep()
        step.clipped_sum(x, y, 1.0)
    # Each term is added to a temporary variable when it is there.
    assert ("TemporaryVariable" in kinds) == rewritten
    assert step.method == "rows"
    if not rewritten:
        assert 0 < moved(step, x, y, leaving=19) <= 1


def test_graphs_are_traced_under_these_options_too():
    """A function that a layer compiles, and that is not inlined, keeps those under which it was traced."""
    seen = []

    class Noting(layers.Layer):
        def call(self, x):
            if tf.inside_function():
                seen.append(context.context().function_call_options.config_proto_serialized)
            return x

    dp_sgd(keras.Sequential([keras.Input((3,)), Noting(), layers.Dense(2, activation="softmax")]))
    # The last trace is that of the graph which is used; those before are of trials on the model itself.
    kinds = rewriter_config_pb2.RewriterConfig
    options = config_pb2.ConfigProto.FromString(seen[-1]).graph_options.rewrite_options
    assert all(getattr(options, name) == kinds.OFF for name in PASSES)
    assert options.memory_optimization == kinds.NO_MEM_OPT


def test_the_threads_own_options_are_as_they_were_afterwards():
    own = context.context()
    before = own.function_call_options
    with suppress(ZeroDivisionError), as_traced():
        assert own.function_call_options is not before
        raise ZeroDivisionError
    assert own.function_call_options is before


def test_the_options_that_are_set_reach_the_graphs():
    with as_traced():
        config = context.context().function_call_options.config_proto_serialized
    options = type(context.context().config)().FromString(config).graph_options.rewrite_options
    assert all(getattr(options, name) == options.OFF for name in PASSES)
    assert options.memory_optimization == options.NO_MEM_OPT
