"""However weights amplify, cancel or underflow, one unit moves the sum that is released by S at most."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from adversarial_tensors import KINDS, compiled, search
from examples_of_dpsgd import LOSS, dp_sgd, functional, head, norm
from support import failures, mostly_slow

from cloister.privacy.dpsgd import forms, noise
from cloister.privacy.dpsgd.noise import noisy_sum
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.errors import ConfigError

layers = keras.layers
CASES = 400
MANY_CASES = 10**6


@pytest.mark.parametrize(
    "name",
    mostly_slow(KINDS, ["outer", "gram of groups", "dense one by one", "one by one"]),
)
def test_one_unit_moves_the_sum_of_every_kernel_by_the_bound_at_most(name):
    assert 0.5 < search(name, CASES) <= 1


@pytest.mark.long
def test_nor_in_many_cases():
    assert max(search(name, MANY_CASES // len(KINDS), seed=1) for name in KINDS) <= 1


WIDTHS = {(1, 784): 784, (4096,): 4096, (100_352,): 512, (8191,): 1, (3, 3, 64, 128): 512, (5, 8192): 512}
"""Shapes of rows, and how many of their squares are added up in single precision."""


def test_squares_are_never_less_than_exact_ones_and_hardly_more():
    """Rows whose last axis is longer than `WIDEST` are added up in equal parts of `PART` at most."""

    def check(shape, scale):
        numbers = (scale * np.random.default_rng(3).standard_normal((4, *shape))).astype(np.float32)
        numbers[1] = np.abs(numbers[1]).max()
        exact = np.square(numbers.astype(np.float64).reshape(4, -1)).sum(axis=1)
        found = np.asarray(forms.squares(tf.constant(numbers)))
        allowed = 4 * (forms.WIDEST + 1) * noise.UNIT * exact + 2 * numbers[0].size * noise.UNDERFLOW
        assert (found >= exact).all() and (found <= exact + allowed).all()

    assert {shape: forms._width(shape) for shape in WIDTHS} == WIDTHS
    assert failures([(shape, scale) for shape in WIDTHS for scale in (1.0, 1e-19, 1e-30)], check) == []


class TestTheSearchCatches:
    @pytest.fixture(autouse=True)
    def compile_anew(self):
        compiled.cache_clear()
        yield
        compiled.cache_clear()

    def test_squares_that_underflow(self, monkeypatch):
        def squares(tensor):
            return tf.cast(tf.reduce_sum(tf.square(tf.reshape(tensor, [tensor.shape[0], -1])), axis=1), tf.float64)

        monkeypatch.setattr(forms, "squares", squares)
        assert search("outer", CASES) > 1.1

    def test_sums_in_single_precision_where_positions_cancel(self, monkeypatch):
        def squares(inputs, deltas):
            return tf.maximum(tf.reduce_sum(inputs * deltas, axis=(1, 2)), 0)

        monkeypatch.setattr(forms, "gram_squares", squares)
        original = tf.matmul

        def single(a, b, transpose_a=False, transpose_b=False):
            if not transpose_a:
                return original(a, b, transpose_b=transpose_b)
            narrow = [tf.cast(tensor, tf.float32) for tensor in (a, b)]
            return tf.cast(original(*narrow, transpose_a=True), tf.float64)

        monkeypatch.setattr(tf, "matmul", single)
        assert search("gram", CASES) > 1.1

    def test_gram_in_single_precision(self, monkeypatch):
        def gram(tensor):
            narrow = tf.cast(tensor, tf.float32)
            return tf.cast(tf.matmul(narrow, narrow, transpose_b=True), tf.float64)

        def squares(inputs, deltas):
            return tf.maximum(tf.reduce_sum(inputs * deltas, axis=(1, 2)), 0)

        monkeypatch.setattr(forms, "gram", gram)
        monkeypatch.setattr(forms, "gram_squares", squares)
        assert search("gram", CASES) > 1.1

    @pytest.mark.slow
    def test_roundings_to_the_grid_that_are_not_charged(self, monkeypatch):
        monkeypatch.setattr(noise, "rounding_steps", lambda parameters: 0.0)
        assert search("outer", CASES) > 1.002

    def test_examples_that_are_clipped_in_the_place_of_groups(self, monkeypatch):
        every = forms.squares
        monkeypatch.setattr(forms, "squares", lambda gradients: every(gradients) / 4)
        assert search("one by one in groups", CASES) > 1.1


def two_dense():
    return keras.Sequential([keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10, "softmax")])


def test_large_inputs_and_small_deltas_do_not_escape_the_clip():
    """Squares of deltas underflow in float32, and their products with inputs do not."""
    model = two_dense()
    step = dp_sgd(model, batch_size=1)
    x = np.random.default_rng(0).uniform(0, 1, (1, 64)).astype(np.float32)

    def check(scale, gap, bound):
        top = np.array([gap] + [0] * 9, np.float32)
        model.set_weights([scale * np.eye(64), np.zeros(64), np.zeros((64, 10)), top])
        assert norm(step.clipped_sum(x, np.array([0]), bound).sums) <= bound

    pairs = ((1e18, 43.8), (3e18, 43.8), (3e18, 50.0), (1e38, 80.0))
    assert failures([(*pair, bound) for pair in pairs for bound in (1.0, 0.01, 1e-3)], check) == []


def test_positions_that_cancel_do_not_escape_the_clip():
    model = keras.Sequential([keras.Input((2, 64)), layers.Dense(64), layers.Flatten(), layers.Dense(3, "softmax")])
    step = dp_sgd(model, batch_size=2)
    assert "gram" in step.kernels.values()

    def check(scale):
        rng = np.random.default_rng(0)
        kernel = scale * rng.standard_normal((64, 3))
        model.set_weights([np.zeros((64, 64)), np.zeros(64), np.concatenate([kernel, -kernel]), np.zeros(3)])
        x = np.repeat(rng.uniform(0, 1, (1, 1, 64)), 2, axis=1).astype(np.float32)
        assert 0 < norm(step.clipped_sum(x, np.array([1]), 1.0).sums) <= 1

    assert failures([1.0, 1e6, 1e9, 1e15], check) == []


def test_a_bound_that_underflow_has_a_say_in_is_refused():
    step = dp_sgd(functional((4,), head))

    def check(bound):
        with pytest.raises(ConfigError, match="clipping_norm"):
            step.clipped_sum(np.ones((2, 4), np.float32), np.zeros(2, int), bound)
        with pytest.raises(ConfigError, match="clipping_norm"):
            noisy_sum([], (np.zeros(1),), clipping_norm=bound, noise_multiplier=1.0, noise=GaussianNoise())

    assert failures([1e-46, 1e-33, 9e-13, 0.0, float("nan"), float("inf")], check) == []


def test_an_example_without_a_gradient_at_the_smallest_bound():
    model = functional((4,), head)
    step = dp_sgd(model)
    model.set_weights([np.zeros((4, 5)), np.array([200.0, 0, 0, 0, 0])])
    found = step.clipped_sum(np.ones((3, 4), np.float32), np.array([0, 1, 2]), noise.MINIMUM_CLIPPING_NORM)
    assert all(np.isfinite(total).all() for total in found.sums) and found.non_finite == 0


def test_the_bound_with_eta_is_what_contributions_are_clipped_to():
    step = dp_sgd(functional((4,), head), batch_size=600)
    step.model.set_weights([np.zeros((4, 5)), np.zeros(5)])
    x, y = np.full((1, 4), 1e3, np.float32), np.array([1])
    found = norm(step.clipped_sum(x, y, 1.0).sums) * (1 + step.overstatement)
    assert 0.03 < step.overstatement <= noise.MAXIMUM_OVERSTATEMENT and 1 - 1e-5 < found <= 1 + 1e-7


class TestAnExampleThatRaises:
    def test_takes_nothing_from_the_others(self):
        model = functional((3,), lambda x: head(layers.Flatten()(layers.Embedding(7, 6)(x))), "int32")
        step = dp_sgd(model)
        x, y = np.random.default_rng(0).integers(0, 7, (20, 3)).astype(np.int32), np.arange(20) % 5
        expected = step.clipped_sum(np.delete(x, [2, 11], 0), np.delete(y, [2, 11]), 0.1)
        x[2], y[11] = 99, 77
        found = step.clipped_sum(x, y, 0.1)
        assert found.examples == 20 and 1 <= found.non_finite <= 2
        assert norm([a - b for a, b in zip(found.sums, expected.sums, strict=True)]) < 1e-6

    def test_one_by_one(self):
        def fails():
            raise IndexError("row 17")

        def of(*gradients):
            every = [lambda gradient=gradient: (np.array(gradient),) for gradient in gradients]
            every[1:1] = [fails]
            like = (np.zeros(2),)
            return noisy_sum(every, like, clipping_norm=1.0, noise_multiplier=0.0, noise=GaussianNoise(1))[0]

        np.testing.assert_allclose(of([3.0, 4.0], [0.5, 0.0]), [1.1, 0.8], rtol=1e-4)
        assert np.array_equal(of([3.0, 4.0], [1.0, 2.0, 3.0]), of([3.0, 4.0]))


def test_one_by_one_in_numpy_at_every_scale():
    def of(some, like, bound):
        every = [lambda row=row: row for row in some]
        return noisy_sum(every, like, clipping_norm=bound, noise_multiplier=0.0, noise=GaussianNoise(1))

    def check(seed):
        rng = np.random.default_rng(seed)
        bound = 10.0 ** rng.uniform(-12, 6)
        rows = [tuple(rng.standard_normal(4) * 10.0 ** rng.uniform(-320, 306, 4) for _ in range(2)) for _ in range(5)]
        both = zip(of(rows, rows[0], bound), of(rows[1:], rows[0], bound), strict=True)
        assert norm([a - b for a, b in both]) <= bound

    assert failures(range(50), check) == []


def test_a_factor_that_is_skipped_one_by_one_is_caught(monkeypatch):
    monkeypatch.setattr(noise, "_factor", lambda gradient, bound: 1.0)
    total = noisy_sum(
        [lambda: (np.full(4, 9.0),)], (np.zeros(4),), clipping_norm=1.0, noise_multiplier=0.0, noise=GaussianNoise(1)
    )
    assert norm(total) > 1


class TestPrecision:
    @pytest.fixture(autouse=True)
    def restore(self):
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        yield
        tf.config.experimental.enable_tensor_float_32_execution(before)

    def test_tensor_float_32_is_switched_off(self):
        tf.config.experimental.enable_tensor_float_32_execution(True)
        dp_sgd(functional((4,), head))
        assert not tf.config.experimental.tensor_float_32_execution_enabled()

    def test_whoever_switches_it_on_again_is_refused(self):
        step = dp_sgd(functional((4,), head))
        tf.config.experimental.enable_tensor_float_32_execution(True)
        with pytest.raises(ConfigError, match="TensorFloat-32"):
            step.step(np.ones((2, 4), np.float32), np.zeros(2, int))

    def test_so_is_a_processor_that_is_set_to_coarser_products(self, monkeypatch):
        monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        with pytest.raises(ConfigError, match="ONEDNN_DEFAULT_FPMATH_MODE"):
            dp_sgd(functional((4,), head), loss=LOSS)
