"""The optimizer's step: the same however it is compiled."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import dp_sgd

from cloister.privacy.dpsgd import step as module
from cloister.privacy.dpsgd.step import _descent

LARGE = (600, 500)
"""More numbers than are worth compiling."""


class Unknown(keras.optimizers.SGD):
    """Runs Python in its step, which XLA cannot."""

    def apply(self, gradients, variables):
        tf.py_function(lambda: None, [], [])
        return super().apply(gradients, variables)


def after_steps(optimizer, worth, monkeypatch, shapes=(LARGE, (500,)), steps=3):
    """Variables and the optimizer's own, after some steps."""
    monkeypatch.setattr(module, "WORTH_COMPILING", worth)
    rng = np.random.default_rng(0)
    variables = [keras.Variable(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    optimizer.build(variables)
    step = _descent(optimizer, variables)
    for _ in range(steps):
        step(*[rng.standard_normal(shape).astype(np.float32) for shape in shapes])
    return step, [np.array(variable) for variable in (*variables, *optimizer.variables)]


def is_fused(step):
    return step.function_def.attr["_XlaMustCompile"].b


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.01, clipnorm=1.0),
        lambda: keras.optimizers.RMSprop(0.1, use_ema=True),
    ],
    ids=["nesterov", "adam with a schedule", "adamw with a clip", "rmsprop with an average"],
)
@pytest.mark.slow
def test_it_comes_to_the_same_compiled_or_not(make, monkeypatch):
    shapes = (60, 50), (50,)
    fused, compiled = after_steps(make(), 0, monkeypatch, shapes)
    plain, expected = after_steps(make(), 10**9, monkeypatch, shapes)
    assert is_fused(fused) and not is_fused(plain)
    assert len(compiled) == len(expected)
    for one, other in zip(compiled, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_rate_may_change_between_steps(monkeypatch):
    monkeypatch.setattr(module, "WORTH_COMPILING", 0)
    optimizer, variable = keras.optimizers.SGD(1.0), keras.Variable(np.zeros(3, np.float32))
    optimizer.build([variable])
    step = _descent(optimizer, [variable])
    step(np.ones(3, np.float32))
    optimizer.learning_rate = 0.5
    step(np.ones(3, np.float32))
    np.testing.assert_array_equal(variable, [-1.5] * 3)


def test_small_models_and_optimizers_that_xla_does_not_know_are_not_compiled(monkeypatch):
    worth = module.WORTH_COMPILING
    small, _ = after_steps(keras.optimizers.SGD(0.1), worth, monkeypatch, shapes=((500, 500),))
    large, _ = after_steps(keras.optimizers.SGD(0.1), worth, monkeypatch)
    assert not is_fused(small) and is_fused(large)
    unknown, found = after_steps(Unknown(0.1), worth, monkeypatch)
    _, expected = after_steps(keras.optimizers.SGD(0.1), 10**9, monkeypatch)
    assert not is_fused(unknown)
    np.testing.assert_array_equal(found[0], expected[0])


def test_without_xla_it_is_not_compiled(monkeypatch):
    def missing(*_):
        raise tf.errors.NotFoundError(None, None, "could not find a compiler for platform Host")

    monkeypatch.setattr(type(tf.function(lambda: None)), "experimental_get_compiler_ir", missing)
    step, _ = after_steps(keras.optimizers.SGD(0.1), 0, monkeypatch)
    assert not is_fused(step)


class KeepsTheFirst(keras.optimizers.SGD):
    """Keeps the gradients of its first step, as they are: the variables may share their memory."""

    def apply(self, gradients, variables):
        for kept, gradient in zip(self.kept, gradients, strict=True):
            kept.assign(tf.where(self.iterations == 0, gradient, kept))
        return super().apply(gradients, variables)


@pytest.mark.slow
def test_a_gradient_that_an_optimizer_keeps_stays_what_it_is_when_compiled(monkeypatch):
    monkeypatch.setattr(module, "WORTH_COMPILING", 0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    optimizer = KeepsTheFirst(0.1)
    optimizer.kept = [tf.Variable(tf.zeros(variable.shape)) for variable in model.trainable_variables]
    before = [np.array(variable) for variable in model.trainable_variables]
    private = dp_sgd(model, optimizer=optimizer)
    assert is_fused(private._descend)
    empty = np.empty((0, 6), np.float32), np.empty(0, np.int64)
    private.step(*empty)
    first = [(a - b) / 0.1 for a, b in zip(before, map(np.array, model.trainable_variables), strict=True)]
    private.step(*empty)
    for kept, expected in zip(optimizer.kept, first, strict=True):
        np.testing.assert_allclose(kept, expected, rtol=1e-3, atol=1e-5)
