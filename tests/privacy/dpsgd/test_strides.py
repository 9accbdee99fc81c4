"""The number of units in a call suits the processor: no row of a product comes out otherwise than the rest."""

import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import dp_sgd, functional, head
from keras import layers

from cloister.privacy.dpsgd import strides
from cloister.privacy.dpsgd.strides import stride


def rows_of(one, examples):
    return tf.constant(np.repeat(one[None], examples, axis=0))


def same_rows(function, shape, examples):
    one = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = function(rows_of(one, examples)).numpy()
    return (found == found[0]).all()


def kernel(*shape):
    return tf.random.stateless_normal(shape, (1, 2))


PRODUCTS = {
    "dense": ((300,), lambda x: x @ kernel(300, 33)),
    "transposed": ((64,), lambda x: tf.matmul(x, kernel(10, 64), transpose_b=True)),
    "positions": ((7, 16), lambda x: tf.tensordot(x, kernel(16, 10), 1)),
    "a sequence": ((27, 9), lambda x: tf.nn.conv1d(x, kernel(3, 9, 13), 1, "VALID")),
    "pictures": ((13, 13, 3), lambda x: tf.nn.conv2d(x, kernel(5, 5, 3, 12), 1, "SAME")),
    "strided": ((13, 13, 1), lambda x: tf.nn.conv2d(x, kernel(5, 5, 1, 12), 2, "SAME")),
    "dilated": ((5, 5, 3), lambda x: tf.nn.conv2d(x, kernel(3, 3, 3, 12), 1, "SAME", dilations=2)),
    "transposed pictures": (
        (7, 7, 3),
        lambda x: tf.nn.conv2d_transpose(x, kernel(3, 3, 8, 3), [len(x), 14, 14, 8], 2),
    ),
}


@pytest.mark.parametrize("multiple", [1, 2, 3, 5])
@pytest.mark.parametrize(("shape", "product"), PRODUCTS.values(), ids=PRODUCTS)
def test_no_row_of_a_product_differs(shape, product, multiple):
    assert same_rows(product, shape, multiple * stride())


def differing_behind(rows):
    """A product of which the last bit of every row behind whole blocks of so many is another."""

    def product(left, right):
        found = np.einsum("ij,jk->ik", left, right)
        found[len(found) // rows * rows :] *= 1 + np.finfo(found.dtype).eps
        return tf.constant(found)

    return product


@pytest.fixture
def asked_anew():
    stride.cache_clear()
    yield
    stride.cache_clear()


@pytest.mark.parametrize(("block", "expected"), [(16, 16), (6, 48), (24, 48), (48, 48), (5, 1)])
def test_the_stride_follows_from_how_many_rows_are_computed_together(block, expected, asked_anew, monkeypatch):
    monkeypatch.setattr(strides.tf, "matmul", differing_behind(block))
    assert stride() == expected


@pytest.mark.slow
def test_without_a_number_that_suits_one_unit_is_computed_at_a_time(asked_anew, monkeypatch):
    monkeypatch.setattr(strides, "STRIDES", ())
    step = dp_sgd(functional((5,), lambda x: head(layers.Dense(7)(x))))
    assert step.method == "in turn"
