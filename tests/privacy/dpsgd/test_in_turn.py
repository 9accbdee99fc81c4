"""Units in turn: what one contributes is a function of that unit alone, for any model."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from examples_of_dpsgd import LOSS, Scaled, batch, functional, head, norm, perturbed
from support import failures

from cloister.core.errors import UnsupportedModel
from cloister.privacy.dpsgd import in_turn
from cloister.privacy.dpsgd.draws import Seeds
from cloister.privacy.dpsgd.in_turn import InTurn
from cloister.privacy.dpsgd.probe import made_up
from cloister.privacy.dpsgd.rounding import Batching

layers = keras.layers


def recurrent():
    return functional((5, 3), lambda x: head(layers.LSTM(4)(x)))


def own():
    return functional((6,), lambda x: head(Scaled()(layers.Dense(4, activation="tanh")(x))))


def residuals():
    """The gradient of the input of three branches is a sum of three terms, and of more behind them."""

    def inner(x):
        h = layers.Conv2D(4, 3, padding="same")(x)
        branches = [
            layers.Activation(name)(layers.Add()([h, layers.Conv2D(4, 3, padding="same")(h)])) for name in NAMES
        ]
        return head(layers.Add()(branches))

    return functional((6, 6, 2), inner)


NAMES = ("tanh", "sigmoid", "softplus")
MODELS = (recurrent, own, residuals)


def turns(build):
    model = perturbed(build())
    return InTurn(model, LOSS, made_up(model), Batching(8)), *batch(model, 8)


def summed(engine, x, y, bound=1.0):
    return engine(x, y, np.ones((len(x), 1), bool), bound, Seeds(0))


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
    turns(residuals)
    monkeypatch.setattr(in_turn, "chained_sums", nullcontext)
    with pytest.raises(UnsupportedModel, match="in an order that timing decides"):
        turns(residuals)


def test_a_gradient_that_cancels_is_as_long_as_its_norm_says():
    """A kernel that is used twice, with products that cancel: computed twice, they could differ by their roundings."""
    shared = layers.Dense(4, use_bias=False)

    def inner(x):
        return layers.Dense(3, activation="softmax")(layers.Subtract()([shared(x[:, :5]), shared(x[:, 5:])]))

    model = functional((10,), inner)
    engine = InTurn(model, LOSS, made_up(model), Batching(8))
    rng = np.random.default_rng(0)
    for scale in (1e6, 1e12, 1e15):
        model.set_weights([rng.standard_normal((5, 4)), scale * rng.standard_normal((4, 3)), np.zeros(3)])
        half = rng.uniform(0.5, 1, (1, 5)).astype(np.float32)
        for other in (half, np.nextafter(half, np.float32(2))):
            x = np.concatenate([half, other], axis=1)
            assert norm(summed(engine, x, np.array([1]), 1e-3).arrays) <= 1e-3
