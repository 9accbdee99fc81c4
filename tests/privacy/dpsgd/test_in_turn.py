"""Units in turn: what one contributes is a function of that unit alone, for any model."""

from contextlib import nullcontext
from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    Scaled,
    batch,
    brute_force,
    dp_sgd,
    functional,
    head,
    norm,
    perturbed,
    relative_error,
    residuals,
    small,
)
from support import failures
from tensorflow.python.ops import control_flow_util

from cloister.privacy.dpsgd import in_turn
from cloister.privacy.dpsgd.batches import Draws
from cloister.privacy.dpsgd.clipped_sums import Call
from cloister.privacy.dpsgd.in_turn import InTurn
from cloister.privacy.dpsgd.tracing import made_up
from cloister.utils.errors import UnsupportedModel

layers = keras.layers


def recurrent():
    return functional((5, 3), lambda x: head(layers.LSTM(4)(x)))


def own():
    return functional((6,), lambda x: head(Scaled()(layers.Dense(4, activation="tanh")(x))))


MODELS = (recurrent, own, residuals)


@pytest.fixture(autouse=True, scope="module")
def wide():
    """Dense layers of these models are wide enough for their gradients not to be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_turn, "WIDE", 20)
        yield


def compiled(build):
    model = perturbed(build())
    return InTurn(model, LOSS, made_up(model), 8, 1)


once = cache(compiled)
"""A model's engine, which most tests only call: XLA takes seconds for it."""


def turns(build):
    engine = once(build)
    return engine, *batch(engine.model, 8)


def summed(engine, x, y, bound=1.0):
    return engine(Call(x, y, np.ones((len(x), 1), bool), bound, engine.seeds(Draws(0))[: len(x)]))


def test_hostile_units_beside_it_change_no_bit_of_a_units_contribution():
    def check(build):
        engine, x, y = turns(build)
        alone = summed(engine, x[:1], y[:1])
        x[1:] = np.nan
        found = summed(engine, x, y)
        assert found.non_finite == 7
        assert all(np.array_equal(a, b) for a, b in zip(alone.arrays, found.arrays, strict=True))

    assert not failures(MODELS, check)


def test_a_unit_moves_the_sum_by_the_bound_at_most():
    def check(build):
        engine, x, y = turns(build)
        for bound in (1e-6, 0.1, 10.0):
            whole, others = summed(engine, x, y, bound).arrays, summed(engine, x[1:], y[1:], bound).arrays
            assert 0 < norm([a - b for a, b in zip(whole, others, strict=True)]) <= bound * (1 + 1e-12)

    assert not failures(MODELS, check)


def test_a_sum_whose_order_follows_from_timing_is_chained_or_refused(monkeypatch):
    """Two equal calls of `AddN` gave sums 8.5·S apart."""
    once(residuals)
    monkeypatch.setattr(in_turn, "chained_sums", nullcontext)
    with pytest.raises(UnsupportedModel, match="in an order that timing decides"):
        compiled(residuals)


def test_a_gradient_that_cancels_is_as_long_as_its_norm_says():
    """A kernel that is used twice, with products that cancel: computed twice, they could differ by their roundings."""
    shared = layers.Dense(4, use_bias=False)

    def inner(x):
        return layers.Dense(3, activation="softmax")(layers.Subtract()([shared(x[:, :5]), shared(x[:, 5:])]))

    model = functional((10,), inner)
    engine = InTurn(model, LOSS, made_up(model), 8, 1)
    rng = np.random.default_rng(0)
    for scale in (1e6, 1e12, 1e15):
        model.set_weights([rng.standard_normal((5, 4)), scale * rng.standard_normal((4, 3)), np.zeros(3)])
        half = rng.uniform(0.5, 1, (1, 5)).astype(np.float32)
        for other in (half, np.nextafter(half, np.float32(2))):
            x = np.concatenate([half, other], axis=1)
            assert norm(summed(engine, x, np.array([1]), 1e-3).arrays) <= 1e-3


def tied():
    """A kernel that its layer uses, and something else."""

    class Tied(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(6, use_bias=False)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x) + keras.ops.matmul(x, keras.ops.transpose(self.dense.kernel))

    return small(Tied())


def called_twice():
    twice = layers.Dense(6, activation="tanh")
    return small(twice, twice)


def of_positions():
    return functional((3, 6), lambda x: head(layers.Dense(8, activation="tanh")(x)))


WIDE = {"a chain": (lambda: small(layers.Dense(6, activation="tanh")), 2)} | {
    build.__name__: (build, 1) for build in (tied, called_twice, of_positions)
}
"""Each model, and its matrices with one product with a vector."""


def test_a_gradient_that_is_not_made_is_right_and_kept_apart_only_for_one_product():
    def check(name):
        build, count = WIDE[name]
        model = perturbed(build())
        x, y = batch(model, 5)
        engine = InTurn(model, LOSS, made_up(model), 8, 1)
        found = summed(engine, x, y, 0.3 / (1 + engine.overstatement))
        assert len(engine._wide) == count
        assert relative_error(found.arrays, brute_force(model, x, y, 0.3)) < 1e-4

    assert not failures(WIDE, check)


def test_squares_of_doubles_that_underflow_do_not_escape_the_clip():
    """An input near 10¹⁵⁴ times a delta near 10⁻¹⁵⁴ moved the sum by 9·S: the squares of the delta are 0."""

    def inner(x):
        return layers.Dense(3, activation="softmax", dtype="float64")(layers.Dense(256, dtype="float64")(x))

    model = functional((8,), inner, "float64")
    engine = InTurn(model, LOSS, made_up(model), 8, 1)
    first, top = model.layers[1:]
    first.set_weights([np.zeros((8, 256)), np.zeros(256)])
    for delta in 1e-154 * np.linspace(0.5, 1.4, 10):
        top.set_weights([np.tile([delta, -delta, 0.0], (256, 1)), np.zeros(3)])
        found = summed(engine, np.full((1, 8), 4e153), np.array([1]), 1.0)
        assert len(engine._wide) == 2 and norm(found.arrays) <= 1


def test_calls_at_the_same_time_are_those_one_after_another(monkeypatch):
    monkeypatch.setattr(in_turn, "THREADS", 4)
    monkeypatch.setattr(in_turn, "WIDE", 1000)
    step = dp_sgd(perturbed(functional((5, 3), lambda x: head(layers.SimpleRNN(4)(x)))), batch_size=40)
    x, y = batch(step.model, 40)
    x[17] = np.inf
    sums, calls = [], []
    for threads in (4, 1):
        step._clipped_sums.engine.threads = threads
        sums.append(step.clipped_sum(x, y, 0.5))
        calls.append(len(list(step._clipped_sums._calls(40))))
    assert calls == [4, 2] and [found.non_finite for found in sums] == [1, 1]
    assert relative_error(sums[0].sums, sums[1].sums) < 1e-12


class WritesUnderXla(layers.Layer):
    """Adds its input to a variable, in what XLA compiles alone."""

    def build(self, _):
        self.total = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            self.total.value.assign_add(tf.reduce_sum(x))
        return x


def test_a_layer_that_writes_what_it_sees_under_xla_is_refused():
    model = small(layers.Dense(4), WritesUnderXla())
    with pytest.raises(UnsupportedModel, match="AssignAddVariableOp"):
        InTurn(model, LOSS, made_up(model), 8, 1)
