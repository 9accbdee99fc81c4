"""The clipped sum is that of one example at a time, for every way there is to compute it."""

import keras
import numpy as np
import pytest
from examples_of_dpsgd import (
    LOSS,
    MODELS,
    TURNS,
    Positions,
    batch,
    brute_force,
    causal,
    clipped_sum,
    dp_sgd,
    embedding,
    functional,
    gradient_of_one,
    gradients,
    group_norm,
    head,
    in_double_precision,
    norm,
    perturbed,
    relative_error,
    sequence,
    smooth,
    take_in_turn,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import mostly_slow

from cloister.privacy.dpsgd import batches, in_rows
from cloister.tasks.datasets.characters import mnist_cnn, mnist_mlp

layers = keras.layers
TOLERANCE = 8e-4
"""Norms are overstated by up to 2·(row of squares)·2⁻²⁴, and contributions clipped to S/(1 + η)."""


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(7)


def mri(side=128):
    return keras.Sequential(
        [
            keras.Input((side, side, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(128, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(32, activation="relu"),
            layers.Dense(4, activation="softmax"),
        ]
    )


def assert_equal_to_brute_force(model, size=8, **options):
    """With a bound that some gradients are within and some are not."""
    x, y = batch(model, size)
    each = gradients(model, x, y)
    bound = float(np.median([norm(gradient) for gradient in each]))
    step = dp_sgd(model, **options)
    found = step.clipped_sum(x, y, bound)
    # Contributions may cancel each other; roundings of theirs do not.
    scale = max(part.max() for part in clipped_sum([list(map(np.abs, gradient)) for gradient in each], bound))
    pairs = zip(found.sums, clipped_sum(each, bound), strict=True)
    assert max(np.abs(ours - theirs).max() for ours, theirs in pairs) < TOLERANCE / 2 * scale
    assert 0 < found.clipped < found.examples == size and found.non_finite == 0
    return step


FORMS = {
    "normalized": {"whole", "outer"},
    "shared": {"whole", "outer"},
    "sequence": {"gram", "whole"},
    "embedding": {"embedding", "whole"},
    "attention": {"whole", "outer"},
    "group_norm": {"whole", "outer"},
    "odd_convolutions": {"whole", "outer"},
    "causal": {"whole", "gram"},
    "depthwise": {"whole", "outer"},
}


@pytest.mark.parametrize("name", mostly_slow(MODELS, ["odd_convolutions", "depthwise"]))
def test_equal_to_brute_force(name):
    step = assert_equal_to_brute_force(smooth(perturbed(MODELS[name]())), size=7)
    assert step.method == "rows"
    assert set(step.kernels.values()) >= FORMS[name]


@pytest.mark.long
@pytest.mark.parametrize("build", [mri, *TURNS.values()])
def test_slower_models(build):
    model = smooth(build())
    assert_equal_to_brute_force(perturbed(model) if build is not mri else model, size=5, batch_size=5)


def assert_equal_with_kinks(build):
    model = in_double_precision(build)
    assert_equal_to_brute_force(model, size=5, batch_size=5)
    assert {variable.dtype for variable in model.trainable_variables} == {"float64"}


def small_mri():
    return mri(side=32)


THESIS = [small_mri, mnist_mlp, mnist_cnn]
KINKED = [group_norm, sequence, MODELS["shared"], MODELS["odd_convolutions"], MODELS["depthwise"]]


@pytest.mark.slow
@pytest.mark.parametrize("build", THESIS + KINKED)
def test_equal_to_brute_force_with_kinks(build):
    assert_equal_with_kinks(build if build in THESIS else lambda: perturbed(build()))


EQUATIONS = {
    "abc,cde->abde": ((5, 2, 3), "de", "whole"),
    "abcd,ecd->abe": ((3, 20), "e", "gram"),
    "abcd,edc->aeb": ((20, 3), None, "gram"),
    "abcd,cdfe->abef": ((3, 15, 14), "ef", "gram"),
    "abcd,bcde->ae": ((7,), "e", "outer"),
}
"""The shape of the output, the bias, and the form."""


@pytest.mark.parametrize("equation", mostly_slow(EQUATIONS, ["abcd,cdfe->abef"]))
def test_every_kind_of_einsum(equation):
    shape, bias, form = EQUATIONS[equation]
    given = (5, 4) if len(equation.split(",")[0]) == 3 else (3, 12, 11)
    layer = layers.EinsumDense(equation, shape, activation="tanh", bias_axes=bias)
    step = assert_equal_to_brute_force(perturbed(functional(given, lambda x: head(layer(x)))), size=5)
    assert step.method == "rows" and form in step.kernels.values()


def test_other_einsums_have_right_sums():
    for equation, shape, bias in (("...b,bc->...c", 3, None), ("abc,bd->adc", (4, 4), "c")):
        layer = layers.EinsumDense(equation, shape, bias_axes=bias)
        assert_equal_to_brute_force(functional((5, 4), lambda x, layer=layer: head(layer(x))), size=5)


class AddsTwice(Positions):
    def call(self, x):
        row = self.table(keras.ops.arange(x.shape[1]))
        return x + row + keras.ops.sum(row)


def test_an_embedding_of_positions_with_another_use_is_computed_in_turn():
    step = assert_equal_to_brute_force(perturbed(functional((5, 6), lambda x: head(AddsTwice()(x)))), size=5)
    assert step.method == "in turn"


class Centred(layers.Layer):
    """Adds something that it normalizes, and that is no example's."""

    def build(self, shape):
        self.rows = np.random.default_rng(3).standard_normal(shape[1:]).astype(np.float32)
        self.normalization = layers.GroupNormalization(2)
        self.normalization.build(self.rows.shape)

    def call(self, x):
        return x + self.normalization(keras.ops.convert_to_tensor(self.rows))


def test_a_normalization_of_what_is_no_examples_is_right():
    step = assert_equal_to_brute_force(perturbed(functional((5, 6), lambda x: head(Centred()(x)))), size=5)
    assert step.method == "in turn"


@st.composite
def models(draw):
    """Small stacks of convolutions and dense layers of all kinds."""
    shape = (draw(st.integers(5, 9)), draw(st.integers(5, 9)), draw(st.integers(1, 3)))

    def inner(x):
        for _ in range(draw(st.integers(0, 2))):
            dilation = draw(st.sampled_from([1, 1, 2]))
            x = layers.Conv2D(
                draw(st.integers(1, 4)),
                (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
                strides=1 if dilation > 1 else draw(st.integers(1, 2)),
                dilation_rate=dilation,
                padding="same",
                use_bias=draw(st.booleans()),
                activation=draw(st.sampled_from(["tanh", "linear", "softplus"])),
            )(x)
        for _ in range(draw(st.integers(0, 2))):
            x = layers.Dense(draw(st.integers(1, 5)), use_bias=draw(st.booleans()), activation="tanh")(x)
        if draw(st.booleans()):
            x = layers.LayerNormalization()(x)
        return head(x, 3)

    return functional(shape, inner)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(models())
def test_generated_models(model):
    assert_equal_to_brute_force(perturbed(model), size=5)


@pytest.fixture(scope="module")
def in_turn():
    keras.utils.set_random_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        take_in_turn(patch)
        return dp_sgd(smooth(perturbed(MODELS["normalized"]())))


def test_units_in_turn_have_the_same_sum(in_turn):
    x, y = batch(in_turn.model, 5)
    rows = dp_sgd(in_turn.model).clipped_sum(x, y, 0.5)
    turns = in_turn.clipped_sum(x, y, 0.5)
    assert in_turn.method == "in turn"
    assert relative_error(turns.sums, rows.sums) < TOLERANCE
    assert turns.clipped == rows.clipped > 0


@pytest.mark.slow
def test_calls_and_empty_places_change_nothing(monkeypatch):
    model, expected = smooth(perturbed(MODELS["shared"]())), {}
    x, y = batch(model, 43)
    for size in range(1, 44):
        own = brute_force(model, x[size - 1 : size], y[size - 1 : size], 0.7)
        expected[size] = [a + b for a, b in zip(expected[size - 1], own, strict=True)] if size > 1 else own
    for at_once in (1, 3, 100):
        monkeypatch.setattr(in_rows, "most_at_once", lambda batch_size, at_once=at_once: at_once)
        step = dp_sgd(model)
        for size in (1, 3, 42, 43):
            found = step.clipped_sum(x[:size], y[:size], 0.7)
            assert relative_error(found.sums, expected[size]) < TOLERANCE
            assert found.examples == size


@pytest.mark.parametrize("cache", [1, 1 << 14])
def test_rounds_of_a_call_add_up(cache, monkeypatch):
    """Each has the sums of held gradients, of kept tensors and of groups."""
    monkeypatch.setattr(batches, "CACHE", cache)
    model = smooth(perturbed(causal()))
    step = dp_sgd(model, group_cap=2)
    x, y = batch(model, 12)
    found = step.clipped_sum(x, y, 0.5, groups=np.repeat(np.arange(6), 2))
    engine = step._clipped_sums.engine
    assert engine.at_once == 2 if cache == 1 else 1 < engine.at_once < 6
    total = [np.zeros(variable.shape) for variable in model.trainable_variables]
    for first in range(0, 12, 2):
        own = [sum(pair) / 2 for pair in zip(*(gradient_of_one(model, x[i], y[i]) for i in (first, first + 1)))]
        total = [old + min(1.0, 0.5 / norm(own)) * new for old, new in zip(total, own, strict=True)]
    assert relative_error(found.sums, total) < TOLERANCE and found.examples == 6


@pytest.mark.parametrize(("side", "width", "method"), [(96, 8, "in turn"), (96, 8192, "rows"), (16, 8, "rows")])
def test_large_examples_of_few_weights_are_computed_in_turn(side, width, method, monkeypatch):
    monkeypatch.setattr(batches, "CACHE", 1 << 18)
    pooled = [layers.GlobalAveragePooling2D(), layers.Dense(width), layers.Dense(5, activation="softmax")]
    model = keras.Sequential([keras.Input((side, side, 1)), layers.Conv2D(8, 3), *pooled])
    step = dp_sgd(model)
    assert step.method == method
    assert ("more memory than all weights" in step.why_in_turn) == (method == "in turn")


def test_double_precision_and_inputs_by_name():
    def inner(x):
        x = layers.Dense(4, activation="tanh", dtype="float64")(inputs=x)
        return layers.Dense(3, activation="softmax", dtype="float64")(x)

    model = functional((6,), inner)
    x, y = batch(model)
    found = dp_sgd(model).clipped_sum(x, y, 0.3)
    assert found.sums[0].dtype == np.float64
    assert relative_error(found.sums, brute_force(model, x, y, 0.3)) < TOLERANCE


def test_another_loss():
    model = functional((4,), lambda x: layers.Dense(2)(layers.Dense(3, activation="tanh")(x)))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 4), np.float32), rng.standard_normal((6, 2), np.float32)
    step = dp_sgd(model, loss=keras.losses.mean_squared_error, probe=(x[:3], y[:3]))
    found = step.clipped_sum(x, y, 0.3)
    assert relative_error(found.sums, brute_force(model, x, y, 0.3, keras.losses.mean_squared_error)) < TOLERANCE


@pytest.mark.parametrize("build", mostly_slow(MODELS.values(), [sequence]))
def test_no_contribution_is_longer_than_the_bound(build):
    model = perturbed(build())
    step = dp_sgd(model, batch_size=1)
    for x, y in zip(*batch(model, 4, seed=3), strict=True):
        bound = 0.3 * norm(step.clipped_sum(x[None], y[None], 1e6).sums)
        assert bound * (1 - 1e-3) < norm(step.clipped_sum(x[None], y[None], bound).sums) <= bound


@pytest.mark.parametrize(
    "build, bad",
    mostly_slow(
        [(sequence, np.inf)] + [(build, np.nan) for build in MODELS.values() if build is not embedding],
        [(sequence, np.inf)],
    ),
)
def test_what_is_not_finite_contributes_zero(build, bad):
    model = build()
    x, y = batch(model, 5)
    step = dp_sgd(model, batch_size=5)
    # The last: without it the others stay in their places, and are rounded as before on either side of a kink.
    expected = step.clipped_sum(x[:4], y[:4], 0.5)
    x[4] = bad
    found = step.clipped_sum(x, y, 0.5)
    assert found.non_finite == 1 and found.examples == 5
    assert relative_error(found.sums, expected.sums) < TOLERANCE
    amidst = step.clipped_sum(np.roll(x, 3, axis=0), np.roll(y, 3), 0.5)
    assert amidst.non_finite == 1 and all(np.isfinite(total).all() for total in amidst.sums)


def test_what_is_not_finite_contributes_zero_in_turn(in_turn):
    x, y = batch(in_turn.model, 4)
    x[1] = np.inf
    found = in_turn.clipped_sum(x, y, 0.5)
    assert found.non_finite == 1
    keep = [0, 2, 3]
    assert relative_error(found.sums, brute_force(in_turn.model, x[keep], y[keep], 0.5)) < TOLERANCE


def test_nothing_is_compiled_twice():
    traces = []

    def loss(y, outputs):
        traces.append(y.shape)
        return LOSS(y, outputs)

    model = embedding()
    x, y = batch(model, 40)
    step = dp_sgd(model, loss=loss, probe=(x[:3], y[:3]), batch_size=16)
    assert len(traces) == 2  # for the proof, and for rounds of all places
    traces.clear()
    for size in (16, 1, 0, 7, 40, 15, 17, 33, 2):
        step.step(x[:size], y[:size])
    assert not traces


def test_a_weight_that_the_loss_does_not_need_has_a_gradient_of_zero():
    inputs = keras.Input((4,))
    unused = layers.Dense(3, name="unused")(inputs)
    model = keras.Model(inputs, head(inputs) + 0 * keras.ops.sum(keras.ops.stop_gradient(unused), 1, keepdims=True))
    x, y = batch(model)
    found = dp_sgd(model).clipped_sum(x, y, 0.5)
    assert relative_error(found.sums, brute_force(model, x, y, 0.5)) < TOLERANCE
    assert [not total.any() for total in found.sums].count(True) == 2
