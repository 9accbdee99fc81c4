"""Losses that are multiplied with a number, before an example's gradient is clipped."""

import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    batch,
    brute_force,
    dp_sgd,
    functional,
    gradient_of_one,
    head,
    norm,
    relative_error,
    take_in_turn,
)
from support import mostly_slow

from cloister.core.errors import ConfigError

OWN = tf.constant([0.0, 0.5, 1.0, 3.0, 8.0])
BOUND = 0.4


def by_class(labels):
    return tf.gather(OWN, labels)


def for_all(labels):
    return OWN[3]


def weighted(loss_weights):
    return lambda y, outputs: LOSS(y, outputs) * loss_weights(y)


@pytest.fixture
def model():
    return functional((6,), head)


@pytest.fixture(params=mostly_slow(["rows", "in turn"], ["rows"]))
def method(request, monkeypatch):
    if request.param == "in turn":
        take_in_turn(monkeypatch)
    return request.param


@pytest.mark.parametrize("loss_weights", [by_class, for_all])
def test_a_gradient_is_clipped_with_its_loss_weight(loss_weights, method, model):
    x, y = batch(model, 12)
    step = dp_sgd(model, loss_weights=loss_weights)
    found = step.clipped_sum(x, y, BOUND)
    gradients = [gradient_of_one(model, *one, weighted(loss_weights)) for one in zip(x, y, strict=True)]
    lengths, bound = np.array([norm(gradient) for gradient in gradients]), BOUND / (1 + step.overstatement)
    factors = np.minimum(1, bound / np.maximum(lengths, 1e-9))  # by a weight of 0 a gradient is zero
    expected = [sum(map(np.multiply, factors, same)) for same in zip(*gradients, strict=True)]
    assert relative_error(found.sums, expected) < 3e-4
    assert step.method == method and found.clipped == np.sum(lengths > bound) > 0


def test_the_mean_of_a_group_is_that_of_weighted_gradients(method, model):
    x, y = batch(model, 6)
    groups = np.array([0, 0, 1, 1, 1, 2])
    found = dp_sgd(model, loss_weights=by_class, group_cap=3).clipped_sum(x, y, 1e3, groups)
    loss = weighted(by_class)
    means = []
    for group in range(3):
        own = [gradient_of_one(model, *one, loss) for one in zip(x[groups == group], y[groups == group], strict=True)]
        means.append([np.mean(same, axis=0) for same in zip(*own, strict=True)])
    assert relative_error(found.sums, [sum(same) for same in zip(*means, strict=True)]) < 3e-4


def test_without_them_nothing_is_weighed(model):
    x, y = batch(model, 12)
    assert relative_error(dp_sgd(model).clipped_sum(x, y, BOUND).sums, brute_force(model, x, y, BOUND)) < 3e-4


@pytest.mark.parametrize("loss_weights", [lambda labels: tf.ones([len(labels), 1]), lambda labels: tf.ones([2])])
def test_weights_of_another_shape_are_refused(loss_weights, model):
    with pytest.raises(ConfigError, match=r"one number per example, shape \(3,\), or one; got \("):
        dp_sgd(model, loss_weights=loss_weights)


def test_weights_that_raise_an_exception_do_so_at_once(model):
    """In a step it would be taken for the units' own, and nothing but noise would be trained on."""

    def broken(labels):
        raise NameError("typo")

    with pytest.raises(NameError, match="typo"):
        dp_sgd(model, loss_weights=broken)
