"""What has no private gradient is refused with a reason, and what cannot be looked at layer by layer is noticed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    BatchMean,
    Folded,
    Reversed,
    batch,
    brute_force,
    dp_sgd,
    embedding,
    functional,
    group_norm,
    head,
    moved,
    perturbed,
    relative_error,
    small,
)
from support import failures, mostly_slow

from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.errors import ConfigError, UnsupportedModel
from cloister.utils.rows import cast

layers = keras.layers


class Counter(keras.Layer):
    """Learns from data without a gradient."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.seen.assign(self.seen + keras.ops.sum(x))
        return x


class Penalty(keras.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


class Tied(keras.Layer):
    """Reads a weight of another layer."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.other[0].kernel))


class Borrowed(keras.Layer):
    """Owns the same variable as another layer."""

    def __init__(self, other):
        super().__init__()
        self.kernel = other.kernel

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


class ByHand(keras.Model):
    """A model with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")
        self.top = layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.top(x * self.scale)


def normalization():
    learnt = layers.Normalization()
    learnt.adapt(np.ones((4, 6), np.float32))
    return learnt


class Raises(keras.Layer):
    """Works on a batch, and on nothing else."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        if not tf.executing_eagerly():
            raise RuntimeError("patient 17")
        return x * self.scale


def masked_recurrent():
    embedded = layers.Embedding(11, 4, mask_zero=True)
    return functional((5,), lambda x: head(layers.LSTM(4)(embedded(x))), "int32")


REFUSED = {
    "float16, whose norms": lambda: small(layers.Dense(3, dtype="float16")),
    "BatchNormalization.*GroupNormalization": lambda: small(layers.BatchNormalization()),
    "Normalization.*public mean": lambda: small(normalization()),
    "BatchMean.* takes the examples of a batch together": lambda: small(BatchMean()),
    "changes while training": lambda: small(Counter()),
    "loss of its own": lambda: small(Penalty()),
    "weight_decay": lambda: small(layers.Dense(3, kernel_regularizer="l2")),
    "adds a penalty": lambda: small(layers.Dense(3, activity_regularizer="l2")),
    "float32": lambda: small(layers.Dense(3, dtype="mixed_bfloat16")),
    "no trainable": lambda: small_frozen(),
}


def small_frozen():
    model = small()
    model.trainable = False
    return model


def test_refusals_give_the_reason_and_what_to_do():
    def check(reason):
        with pytest.raises(UnsupportedModel, match=reason):
            dp_sgd(REFUSED[reason]())

    assert not failures(REFUSED, check)


@pytest.mark.slow
def test_a_recurrent_layer_with_a_mask_is_computed_in_turn():
    model = perturbed(masked_recurrent())
    x, y = batch(model, 5)
    step = dp_sgd(model)
    assert relative_error(step.clipped_sum(x, y, 0.1).sums, brute_force(model, x, y, 0.1)) < 5e-4
    assert step.method == "in turn"


def test_an_exception_of_a_trace_is_a_refusal_that_tells_its_type_alone():
    model = ByHand()
    model.top, model.middle = Raises(), layers.Dense(3, activation="softmax")
    model(np.ones((3, 4), np.float32))
    with pytest.raises(UnsupportedModel, match=r"\(Raises\) fails .* traced, with RuntimeError at ") as refusal:
        dp_sgd(model, probe=(np.eye(3, 4, dtype=np.float32), np.arange(3) % 3))
    assert "patient" not in str(refusal.value)


def test_layers_that_carry_state_over_batches_are_refused():
    inputs = keras.Input(batch_shape=(3, 4, 3))
    model = keras.Model(inputs, head(layers.SimpleRNN(2, stateful=True)(inputs)))
    with pytest.raises(UnsupportedModel, match="stateful=False"):
        dp_sgd(model)


def test_a_loss_that_couples_examples_is_refused():
    def loss(y, outputs):
        own = LOSS(y, outputs)
        return own - tf.reduce_mean(own)

    model = small()
    x, y = batch(model, 3)
    with pytest.raises(UnsupportedModel, match="takes the examples of a batch together"):
        dp_sgd(model, loss=loss, probe=(x, y))


def test_a_frozen_batch_normalization_is_a_constant():
    frozen = layers.BatchNormalization()
    model = small(layers.Dense(4), frozen)
    frozen.trainable = False
    assert dp_sgd(model).method == "rows"


def between():
    """A frozen layer that the gradient of a trained one goes through."""
    return functional((6,), lambda x: head(layers.Dense(7, activation="tanh", name="frozen")(layers.Dense(5)(x))))


@pytest.mark.slow
@pytest.mark.parametrize("build", [group_norm, embedding, between], ids=lambda build: build.__name__)
def test_frozen_layers_of_any_kind_have_no_gradients_of_examples(build):
    model = build()
    trained = [layer for layer in model.layers if layer.trainable_variables]
    still = [model.get_layer("frozen")] if build is between else trained[:-1]
    for layer in still:
        layer.trainable = False
    x, y = batch(perturbed(model), 6)
    step = dp_sgd(model)
    found = step.clipped_sum(x, y, 0.5)
    assert sorted(step.kernels) == sorted(variable.path for variable in model.trainable_variables)
    assert [total.shape for total in found.sums] == [variable.shape for variable in model.trainable_variables]
    assert relative_error(found.sums, brute_force(model, x, y, 0.5)) < 1e-3


def test_penalties_on_frozen_weights_are_constants_and_on_activities_are_not():
    for penalty, refused in (("kernel_regularizer", False), ("activity_regularizer", True)):
        frozen = layers.Dense(3, **{penalty: "l2"})
        model = small(frozen)
        frozen.trainable = False
        if refused:
            with pytest.raises(UnsupportedModel, match="adds a penalty"):
                dp_sgd(model)
        else:
            assert dp_sgd(model).method == "rows"


ODD = {
    "tied to another layer": lambda: small(*(lambda dense: (dense, Tied(dense)))(layers.Dense(4, activation="tanh"))),
    "examples folded into positions": lambda: functional((3, 6), lambda x: head(Folded()(x))),
    "examples in another order": lambda: small(Reversed()),
}


@pytest.mark.parametrize("name", mostly_slow(ODD, ["tied to another layer"]))
def test_a_layer_called_in_an_odd_way_has_right_sums(name):
    model = perturbed(ODD[name]())
    step = dp_sgd(model)
    assert step.method == ("in turn" if name == "examples in another order" else "rows")
    x, y = batch(model, 6)
    assert relative_error(step.clipped_sum(x, y, 0.8).sums, brute_force(model, x, y, 0.8)) < 5e-4


def test_one_variable_in_two_layers_has_right_sums():
    first = layers.Dense(6, use_bias=False)
    first.build((None, 6))
    model = small(first, layers.Activation("tanh"), Borrowed(first))
    step = dp_sgd(model)
    assert step.method == "rows"
    x, y = batch(model, 6)
    assert relative_error(step.clipped_sum(x, y, 0.8).sums, brute_force(model, x, y, 0.8)) < 5e-4


@pytest.mark.slow
def test_a_model_with_weights_of_its_own_is_taken_in_rows():
    model = ByHand()
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 4), np.float32), rng.integers(0, 3, 6)
    model(x)
    step = dp_sgd(model, probe=(x[:3], y[:3]))
    assert step.method == "rows"
    assert relative_error(step.clipped_sum(x, y, 0.8).sums, brute_force(model, x, y, 0.8)) < 5e-4


def test_checking_leaves_the_model_alone():
    model = small(layers.Dense(4), layers.Dropout(0.5))
    before = [np.array(variable) for variable in model.variables]
    dp_sgd(model, noise=GaussianNoise(1))
    assert len(before) > len(model.weights), "what dropout draws from among them"
    assert all(np.array_equal(a, b) for a, b in zip(before, model.variables, strict=True))
    assert all("call" not in vars(layer) for layer in model.layers)


def test_errors_name_the_key():
    wrong = [
        ({"batch_size": 0}, "batch_size"),
        ({"group_cap": 0}, "group_cap must be > 0, got 0"),
        ({"batch_size": 65_537}, "batch_size must be at most 65536, got 65537"),
        ({"clipping_norm": float("nan")}, "clipping_norm"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"loss": keras.losses.mean_squared_error}, "probe"),
        ({"loss": lambda y, p: tf.reduce_mean(LOSS(y, p)), "probe": batch(small(), 3)}, "one number per example"),
    ]

    def check(options, key):
        with pytest.raises(ConfigError, match=key):
            dp_sgd(small(), **options)

    assert not failures(wrong, check)


def test_a_step_checks_what_it_is_given():
    step = dp_sgd(small())
    x, y = batch(step.model)
    with pytest.raises(ConfigError, match="one length"):
        step.step(x, y[:-1])
    with pytest.raises(ConfigError, match="clipping_norm"):
        step.step(x, y, clipping_norm=0)


def test_floats_out_of_range_are_cast_alike_wherever_they_stand():
    """NumPy's cast to `uint32` depends on their place: an example moved the sum by 4.1 S."""
    step = dp_sgd(functional((1,), lambda x: head(layers.Rescaling(2.0**-31)(x)), "uint32"), batch_size=48)
    kernel = np.zeros((1, 5))
    kernel[0, :2] = 200.0, -200.0
    step.model.layers[-1].set_weights([kernel, np.array([-100.0, 100.0, 0.0, 0.0, 0.0])])
    for bad in (np.nan, -np.inf, -5.0, 1e10):
        for size in (8, 16, 48):
            assert moved(step, np.full((size, 1), bad, np.float32), np.full(size, 2), 1e-3) <= 1, (bad, size)


def test_they_are_cut_to_the_limits_of_the_type():
    for dtype, expected in (
        ("uint8", [0, 255, 0, 255, 7]),
        ("uint32", [0, 300, 0, 2**32 - 1, 7]),
        ("int8", [-5, 127, 0, 127, 7]),
    ):
        assert cast(np.array([-5.0, 300.0, np.nan, np.inf, 7.9], np.float32), dtype).tolist() == expected
