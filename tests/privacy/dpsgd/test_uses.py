"""Weights of own layers, used in any way: in rows where each use has a form, else in turn, and right either way."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import LOSS, batch, brute_force, dp_sgd, functional, head, moved, perturbed, relative_error
from support import mostly_slow

from cloister.audits.keras_kernels import Trial

layers, ops = keras.layers, keras.ops
TOLERANCE = 8e-4


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(7)


class Own(layers.Layer):
    """A layer of weights of these shapes, and of any function of its input and of them."""

    def __init__(self, function, *shapes):
        super().__init__(name="mine")
        self.function, self.shapes = function, shapes

    def build(self, shape):
        self.own = [self.add_weight(shape=each, name=f"own{number}") for number, each in enumerate(self.shapes)]

    def call(self, x):
        return self.function(x, *self.own)


def own(function, *shapes, given=(5, 4), dtype="float32"):
    return lambda: functional(given, lambda x: head(ops.tanh(Own(function, *shapes)(x))), dtype)


def of_each_head(x, w):
    return ops.einsum("btnd,nde->btne", ops.reshape(x, (-1, 5, 2, 2)), w)


def of_each_head_in_capitals(x, w):
    return tf.einsum("bYZd,Zde->bYZe", tf.reshape(x, (-1, 5, 2, 2)), w)


def split_in_two_ways(x, w):
    both = ops.expand_dims(x, -1) * ops.convert_to_tensor([1.0, 2.0])
    return ops.einsum("btd,dhe->bthe", x, w) + ops.expand_dims(ops.einsum("btdh,dhe->bte", both, w), 2)


def token(x, w):
    return ops.concatenate([ops.broadcast_to(w, (ops.shape(x)[0], 1, 4)), x], axis=1)


def hidden(x, w):
    return ops.where(x > 0.3, w, x)


def convolved(x, w):
    return ops.conv(x, w, strides=2, padding="same")


def of_heads_by_copies(x, w):
    return ops.matmul(ops.expand_dims(x, 1), w)


def in_parts(x, w):
    return x @ w[:, :2] + ops.tanh(x[..., 1:]) @ w[None, 1:, -2:][0]


IN_ROWS = {
    "a product": own(lambda x, w: x @ w, (4, 3)),
    "twice": own(lambda x, w: ops.tanh(x @ w) @ w, (4, 4)),
    "transposed": own(lambda x, w: x @ ops.transpose(w), (3, 4)),
    "as it is and transposed": own(lambda x, w: ops.tanh(x @ w) @ ops.transpose(w), (4, 3)),
    "a product and entry by entry": own(lambda x, w: (x @ w) * w + w, (4, 4), given=(4, 4)),
    "from the left": own(lambda x, w: ops.matmul(w, x), (3, 5)),
    "an einsum": own(lambda x, w: ops.einsum("btd,dhe->bhte", x, w), (4, 2, 3)),
    "a matrix for each head": own(of_each_head, (2, 2, 3)),
    "a matrix for each head, in capitals": own(of_each_head_in_capitals, (2, 2, 3)),
    "split in two ways": own(split_in_two_ways, (4, 2, 3)),
    "a convolution": own(convolved, (2, 3, 5), given=(9, 3)),
    "a scale and an offset": own(lambda x, w, b: x * w + b, (4,), (4,)),
    "one number": own(lambda x, w: x * w, ()),
    "one number on an axis": own(lambda x, w: x * w[None], ()),
    "positions": own(lambda x, w: x + w, (5, 4)),
    "rows of a table for all": own(lambda x, w: x * ops.take(w, [1, 2, 3, 4, 5], axis=0), (6, 4)),
    "rows of a table for each": own(lambda x, w: ops.take(w, x, axis=0), (8, 3), given=(6,), dtype="int32"),
    "a token": own(token, (1, 1, 4)),
    "a choice of entries": own(hidden, (4,)),
    "in parts": own(in_parts, (4, 4)),
    "every second row": own(lambda x, w: x @ w[::2], (8, 3)),
    "a cut with another axis, backwards": own(lambda x, w: x * w[..., 1, None, ::-1], (1, 2, 4)),
    "rows of several tables": own(
        lambda x, w: x @ tf.gather(w, [[0, 2, 1, 4], [1, 3, 0, 2]], batch_dims=1)[0], (2, 5, 3)
    ),
    "a part of the gradient": own(lambda x, w: x @ w + x @ ops.stop_gradient(w * 2), (4, 3)),
}
FAST = ("a product and entry by entry", "rows of a table for all", "a matrix for each head, in capitals", "in parts")


@pytest.mark.parametrize("name", mostly_slow(IN_ROWS, FAST))
def test_a_weight_of_an_own_layer_is_used_in_rows(name):
    model = perturbed(IN_ROWS[name]())
    x, y = batch(model, 7)
    step = dp_sgd(model)
    assert (step.method, step.why_in_turn) == ("rows", "")
    assert any("mine" in path for path in step.kernels)
    assert relative_error(step.clipped_sum(x, y, 0.3).sums, brute_force(model, x, y, 0.3)) < TOLERANCE


class Straight(layers.Layer):
    """Its weight has a gradient of its own."""

    def build(self, shape):
        self.own = self.add_weight(shape=(shape[-1], 3), name="own")

    def call(self, x):
        @tf.custom_gradient
        def rounded(w):
            return tf.round(4 * w) / 4, lambda upstream: upstream

        return x @ rounded(tf.convert_to_tensor(self.own))


def scaled_to_one(x, w):
    return x @ (w / ops.norm(w))


def added_to_itself(x, w):
    return x + (w + w)


def within_a_loop(x, w):
    return tf.while_loop(lambda k, h: k < 3, lambda k, h: (k + 1, ops.tanh(h @ w)), (0, x))[1]


IN_TURN = {
    "changed before it is used": (own(scaled_to_one, (4, 3)), "mine/own0"),
    "the second part alone": (own(lambda x, w: x @ tf.split(w, 2)[1], (8, 3)), "mine/own0' is used by Split"),
    "added to itself": (own(added_to_itself, (4,)), "mine/own0"),
    "within a loop": (
        own(within_a_loop, (4, 4)),
        "layer 'mine' (Own) is not proved to keep examples apart: StatelessWhile",
    ),
    "a gradient of its own": (lambda: functional((5, 4), lambda x: head(Straight()(x))), "straight/own"),
    "copies of an example meet heads": (own(of_heads_by_copies, (2, 4, 3)), "repeated or added up in a product"),
    "rows of a table again": (own(lambda x, w: x * ops.take(w, [1, 3, 1, 0, 1], axis=0), (6, 4)), "read more than"),
}


@pytest.mark.parametrize("name", mostly_slow(IN_TURN, ["a gradient of its own", "the second part alone"]))
def test_a_use_without_a_form_is_computed_in_turn_and_named(name):
    build, says = IN_TURN[name]
    model = perturbed(build())
    x, y = batch(model, 5)
    step = dp_sgd(model)
    assert step.method == "in turn" and says in step.why_in_turn
    assert relative_error(step.clipped_sum(x, y, 0.3).sums, brute_force(model, x, y, 0.3)) < TOLERANCE


@pytest.mark.slow
def test_a_table_that_is_a_matrix_too_is_computed_in_turn():
    """As in a language model with tied weights."""
    table = layers.Embedding(8, 4)

    def inner(x):
        return ops.softmax(ops.mean(ops.tanh(table(x)), axis=1) @ ops.transpose(table.embeddings))

    class Language(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = table

        def call(self, x):
            return inner(x)

    model = Language()
    x, y = np.arange(30).reshape(5, 6) % 8, np.arange(5)
    model(x)
    step = dp_sgd(model, probe=(x[:3], y[:3]))
    assert step.method == "in turn" and "looked up by rows, and used in other ways too" in step.why_in_turn
    assert relative_error(step.clipped_sum(x, y, 0.3).sums, brute_force(model, x, y, 0.3)) < TOLERANCE


def test_a_weight_in_the_loss_itself_is_computed_in_turn():
    model = perturbed(functional((4,), head))
    kernel = model.layers[-1].kernel

    def loss(y, outputs):
        return LOSS(y, outputs) + 0.1 * ops.sum(ops.square(kernel))

    x, y = batch(model, 5)
    step = dp_sgd(model, loss=loss, probe=(x[:3], y[:3]))
    assert step.method == "in turn" and kernel.path in step.why_in_turn
    assert relative_error(step.clipped_sum(x, y, 0.3).sums, brute_force(model, x, y, 0.3, loss)) < TOLERANCE


TOGETHER = ("as it is and transposed", "a product and entry by entry", "a matrix for each head", "in parts", "a token")


@pytest.mark.parametrize("name", mostly_slow(TOGETHER, TOGETHER[4:]))
def test_no_bit_of_a_unit_depends_on_the_others(name):
    trial = Trial(dp_sgd(IN_ROWS[name]())._clipped_sums.engine, seed=1)
    for _ in range(5):
        trial.case()
    assert trial.changed == 0


@pytest.mark.parametrize("name", mostly_slow(TOGETHER, TOGETHER[4:]))
def test_one_unit_moves_the_sum_by_the_bound_at_most(name):
    model = IN_ROWS[name]()
    step, rng = dp_sgd(model), np.random.default_rng(0)
    moves = []
    for scale in (1.0, 1e6, 1e-12):
        for variable in model.trainable_variables:
            variable.assign(scale * rng.standard_normal(variable.shape))
        moves += [moved(step, *batch(model, 8, seed), bound, seed=seed) for seed, bound in enumerate((1e-6, 1.0, 30.0))]
    assert 0.5 < max(moves) <= 1


@pytest.mark.slow
def test_groups_use_a_weight_at_several_rows():
    model = perturbed(IN_ROWS["as it is and transposed"]())
    x, y = batch(model, 6)
    step = dp_sgd(model, group_cap=2)
    found = step.clipped_sum(x, y, 1e6, groups=np.repeat(np.arange(3), 2))
    assert step.method == "rows"
    whole = brute_force(model, x, y, 1e6)
    assert relative_error(found.sums, [each / 2 for each in whole]) < TOLERANCE
