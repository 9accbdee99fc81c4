"""Networks of large pictures whose first layers take one example after another."""

import itertools
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    batch,
    brute_force,
    dp_sgd,
    first_moves,
    functional,
    gradient_of_one,
    head,
    norm,
    relative_error,
    untried,
)
from support import mostly_slow

from cloister.privacy.dpsgd import checks, gradients, in_rows, row_by_row
from cloister.privacy.dpsgd.convolution import MANY_EXAMPLES
from cloister.privacy.dpsgd.in_rows import TrialCall
from cloister.privacy.dpsgd.row_by_row import RowByRow
from cloister.privacy.dpsgd.strides import stride

layers = keras.layers
TOLERANCE = 3e-4
PLACES = stride()
BETWEEN = max(2, PLACES // 8)
"""Sizes of graphs are so far apart in tests of several of them."""
BY_ROW = {"row by row", "dense"}
AS_TRACED = "on this processor what was rewritten comes out as it was traced"

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(PLACES == 1, reason="no number of examples suits this processor"),
]


def pictures(*between, size=60, activation="softplus"):
    """Two convolutions of large pictures, and a dense layer."""
    keras.utils.set_random_seed(5)  # here: a fixture's seed is replaced when the test begins
    return keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.Conv2D(6, 3, activation=activation),
            layers.AveragePooling2D(2),
            layers.Conv2D(5, 3, activation=activation),
            layers.AveragePooling2D(1),
            *between,
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(5, activation="softmax"),
        ]
    )


def forms(step):
    return set(step.kernels.values())


@pytest.mark.slow
def test_sums_are_those_of_one_example_at_a_time():
    model = pictures()
    step = dp_sgd(model, batch_size=PLACES)
    assert forms(step) == BY_ROW
    for size in (1, 4, 6, 16, 19):
        x, y = batch(model, size)
        bound = float(np.median([norm(gradient_of_one(model, *one)) for one in zip(x, y, strict=True)]))
        found = step.clipped_sum(x, y, bound * (1 + step.overstatement))
        assert relative_error(found.sums, brute_force(model, x, y, bound)) < TOLERANCE
        assert found.examples == size


@pytest.mark.slow
def test_groups_have_the_mean_of_their_examples_gradients():
    model = pictures()
    x, y = batch(model, 9)
    groups = np.array([0, 1, 1, 2, 3, 3, 4, 4, 0])
    means = []
    for group in range(5):
        own = [gradient_of_one(model, *one) for one in zip(x[groups == group], y[groups == group], strict=True)]
        means.append([np.mean(same, axis=0) for same in zip(*own, strict=True)])
    bound = float(np.median([norm(mean) for mean in means]))
    step = dp_sgd(model, batch_size=PLACES, group_cap=2)
    found = step.clipped_sum(x, y, bound * (1 + step.overstatement), groups)
    expected = [sum(min(1, bound / norm(mean)) * mean[i] for mean in means) for i in range(len(means[0]))]
    assert relative_error(found.sums, expected) < TOLERANCE
    assert found.examples == 5 and ("row by row" in forms(step)) == (2 * PLACES <= MANY_EXAMPLES)


def farthest(step, x, y):
    """By how much it moves that of batches of every size."""
    return max(first_moves(step, x[:size], y[:size], 0.5) for size in range(1, len(x) + 1))


def amplified(**options):
    """Weights by which the last bit of what is computed for an example decides about its gradient."""
    model = pictures(activation=tf.sin)
    step = dp_sgd(model, batch_size=PLACES, **options)
    kernel, bias = model.layers[2].get_weights()
    model.layers[2].set_weights([1e9 * kernel, bias])
    return step, *batch(model, PLACES // 2 + 1, seed=2)


@pytest.mark.slow
def test_an_example_has_one_gradient_whoever_else_is_there():
    step, x, y = amplified()
    assert 0.5 < farthest(step, x, y) <= 1
    assert "row by row" in forms(step)


class LastBit(RowByRow):
    """A twin of which a bit depends on how many rows there are."""

    def copies(self, rows):
        return [[variable * (1 + rows % 16 * 2.0**-23) for variable in own] for own in super().copies(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, tf.zeros_like])
def test_rows_of_which_a_bit_depends_on_their_number_are_not_used(weights, monkeypatch):
    monkeypatch.setattr(row_by_row, "RowByRow", LastBit)
    step, x, y = amplified(loss_weights=weights)
    step._clipped_sums.engine._loss_weights = None
    assert farthest(step, x, y) <= 1
    assert step.method == "rows" and "row by row" not in forms(step)


@pytest.mark.slow
def test_rows_of_which_a_bit_depends_on_their_number_would_break_the_bound(monkeypatch):
    monkeypatch.setattr(row_by_row, "RowByRow", LastBit)
    untried(monkeypatch)
    step, x, y = amplified()
    assert farthest(step, x, y) > 1 and "row by row" in forms(step)


@pytest.fixture(params=["as traced", "rewritten"])
def graphs(request, monkeypatch):
    """Row by row as it is, and a twin whose graphs TensorFlow rewrites, untried."""
    if request.param == "rewritten":
        monkeypatch.setattr(in_rows, "as_traced", nullcontext)
        untried(monkeypatch)
    return request.param


def rewritten_apart(activation):
    """A network whose activation has several terms. They are gathered by names: other names can hide it, or weights."""
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((56, 57, 1), name="input_layer"),
            layers.Conv2D(3, 3, activation=activation, name="conv2d"),
            layers.MaxPooling2D(1, name="max_pooling2d"),
            layers.Conv2D(5, 3, strides=4, activation=tf.sin, name="conv2d_1"),
            layers.Flatten(name="flatten"),
            layers.Dense(5, activation="softmax", name="dense"),
        ],
        name="sequential",
    )


@pytest.mark.slow
def test_rows_are_not_rewritten_apart_in_the_forward_pass(graphs):
    model = rewritten_apart(lambda x: keras.activations.gelu(x, approximate=True))
    step, (x, y) = dp_sgd(model, batch_size=PLACES), batch(model, 17, seed=2)
    model.layers[2].set_weights([1e9 * array for array in model.layers[2].get_weights()])
    moves = first_moves(step, x, y, 0.5)
    assert "row by row" in forms(step)
    if graphs == "as traced":
        assert moves <= 1
    elif moves <= 1:
        pytest.skip(AS_TRACED)


@pytest.mark.slow
def test_rows_are_not_rewritten_apart_in_the_backward_pass(graphs):
    """At the point where its derivative is nothing but roundings, which the last layers amplify."""
    model = rewritten_apart(lambda x: 0.5 + 0.197 * x - 0.004 * x * x * x)
    step, (x, y) = dp_sgd(model, batch_size=PLACES), batch(model, 40, seed=2)
    first, _, last, *_ = model.layers
    rng, root = np.random.default_rng(189), np.float32(np.sqrt(0.197 / 0.012))
    kernel = 2.0 ** rng.uniform(38, 40) * rng.standard_normal(last.kernel.shape)
    kernel[:, :, 1:] = 0
    last.set_weights([kernel.astype(np.float32), rng.standard_normal(5).astype(np.float32)])
    ulp, off = np.spacing(root), rng.uniform(-1, 0, 3)
    moved = rng.uniform(0, 0.6) * ulp / 3 * rng.standard_normal(first.kernel.shape)
    first.set_weights([moved.astype(np.float32), (root + ulp * off).astype(np.float32)])
    order = [12, 20, 7, 21, 22, 23, 24, 25, 26, 27, 0]  # the examples that change sides weigh most
    moves = first_moves(step, x[order], y[order], 1e-3)
    assert "row by row" in forms(step)
    if graphs == "as traced":
        assert moves <= 1
    elif moves <= 1:
        pytest.skip(AS_TRACED)


@pytest.mark.slow
def test_weights_at_the_beginning_hide_no_difference_between_rows(monkeypatch):
    """With all gradients of the first layer zero, as the weights have it, the trial sees what TensorFlow rewrites."""
    monkeypatch.setattr(in_rows, "as_traced", nullcontext)
    model = rewritten_apart(lambda x: keras.activations.gelu(x, approximate=True))
    kernel, bias = model.layers[0].get_weights()
    model.layers[0].set_weights([0 * kernel, bias - 100])
    step = dp_sgd(model, batch_size=PLACES)
    step.clipped_sum(*batch(model, PLACES), 1.0)
    assert "row by row" not in forms(step)


def strided(activation, *border):
    """Behind the first layers there is one that looks at some of their numbers alone, and an odd number of them."""
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((59, 59, 1)),
            layers.Conv2D(3, 3, activation="relu"),
            layers.Conv2D(3, 3, activation=activation),
            *border,
            layers.Conv2D(5, 3, strides=4, activation=tf.sin),
            layers.Flatten(),
            layers.Dense(5, activation="softmax"),
        ]
    )


def differing(step, scale):
    """How many of six examples have another norm at some place of some graph, with weights that many times as large."""
    strided_one = next(layer for layer in step.model.layers if getattr(layer, "filters", 0) == 5)
    strided_one.set_weights([scale * array for array in strided_one.get_weights()])
    sums, model, found = step._clipped_sums.engine, step.model, 0
    for x, y in zip(*batch(model, 6, seed=2), strict=True):
        call = TrialCall(x, y)
        norms = np.concatenate([sums._norms_and_fingerprints([call], units)[:, 0] for units in sums._graphs])
        assert norms[0] > 0
        found += len(set(norms)) > 1
    assert "row by row" in forms(step)
    return found


@pytest.mark.parametrize(
    "activation",
    [
        pytest.param("softplus", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.long) for each in (tf.sin, "tanh", "relu")),
    ],
)
def test_an_example_is_the_same_to_the_last_bit_at_every_place_of_every_graph(activation, monkeypatch):
    monkeypatch.setattr(in_rows, "FEWER", BETWEEN)
    step = dp_sgd(strided(activation, layers.MaxPooling2D(1)), batch_size=PLACES)
    assert sorted(step._clipped_sums.engine._graphs) == [*range(PLACES // 2, PLACES, BETWEEN), PLACES]
    assert not differing(step, 1.0) and not differing(step, 1e3)


class PutTogether(RowByRow):
    """A twin whose rows are put together by `concat`, an activation last: TensorFlow computes it for all at once."""

    def _features(self, row, own):
        with keras.StatelessScope(list(zip(self.variables, own, strict=True))):
            return row_by_row._through(self.layers, row)

    def outputs(self, x, copies, count):
        rows = tf.concat([self._of_one(x[i : i + 1], own) for i, own in enumerate(copies)], axis=0)
        filled = tf.pad(rows, [[0, count - rows.shape[0]]] + [[0, 0]] * (len(rows.shape) - 1))
        return row_by_row._through(self._others, filled)


@pytest.mark.slow
def test_an_operation_that_was_moved_over_all_rows_is_caught(monkeypatch):
    for module in (checks, gradients):
        monkeypatch.setattr(module, "row_by_row", lambda model: PutTogether(model, 2))
    monkeypatch.setattr(in_rows, "as_traced", nullcontext)
    untried(monkeypatch)
    if not differing(dp_sgd(strided("softplus"), batch_size=PLACES), 1e3):
        pytest.skip("on this processor rows that are computed together come out alike")


class Fragile(layers.Layer):
    """Raises an exception for zeros."""

    def call(self, x):
        return tf.debugging.check_numerics(x / tf.norm(x, axis=-1, keepdims=True), "none")


def fragile(*first, shape):
    return keras.Sequential(
        [
            keras.Input(shape),
            *first,
            layers.Flatten(),
            layers.Dense(7),
            Fragile(),
            layers.Dense(5, activation="softmax"),
        ]
    )


@pytest.mark.parametrize("form", mostly_slow(["by row", "by layer"], ["by layer"]))
def test_an_empty_place_raises_no_exception_that_no_example_does(form):
    first = (layers.Conv2D(6, 3, activation="relu"), layers.AveragePooling2D(8)) if form == "by row" else ()
    model = fragile(*first, shape=(60, 60, 1) if first else (3, 3, 1))
    step = dp_sgd(model, batch_size=PLACES)
    for size in (5, 8, 11, 12, 13, 16):
        x, y = batch(model, size)
        found = step.clipped_sum(x, y, 0.5 * (1 + step.overstatement))
        assert found.non_finite == 0 and relative_error(found.sums, brute_force(model, x, y, 0.5)) < TOLERANCE


@pytest.mark.slow
def test_graphs_from_half_of_the_places_on_are_there_from_the_start_and_none_is_made_later(monkeypatch):
    monkeypatch.setattr(in_rows, "FEWER", BETWEEN)
    traces = []

    def loss(y, outputs):
        traces.append(y.shape)
        return LOSS(y, outputs)

    model = pictures()
    x, y = batch(model, 20)
    step = dp_sgd(model, loss=loss, probe=(x[:3], y[:3]), batch_size=PLACES)
    assert sorted(step._clipped_sums.engine._graphs) == [*range(PLACES // 2, PLACES, BETWEEN), PLACES]
    traces.clear()
    for size in (3, 1, 4, 0, 12, PLACES, 13, 20):
        step.step(x[:size], y[:size])
    assert not traces


class Scaled(layers.Layer):
    """Reads a number from Python, which somebody changes while the model is trained."""

    scale = 1.0

    def call(self, x):
        return x * self.scale


@pytest.mark.slow
def test_a_number_that_is_changed_in_python_changes_nothing_for_some_batches_alone():
    scaled = Scaled()
    model = pictures(scaled)
    step, (x, y) = dp_sgd(model, batch_size=PLACES), batch(model, PLACES - 2)
    x[:], y[:], scaled.scale = x[:1], y[:1], -1.0
    sums = [step.clipped_sum(x[:size], y[:size], 0.1).sums for size in range(1, PLACES - 1)]
    for fewer, more in itertools.pairwise(sums):
        assert norm([a.astype(np.float64) - b for a, b in zip(fewer, more, strict=True)]) <= 0.1


@pytest.mark.slow
def test_the_first_layers_take_no_more_rows_than_are_drawn(monkeypatch):
    monkeypatch.setattr(in_rows, "FEWER", BETWEEN)
    rows, original = [], RowByRow.copies
    monkeypatch.setattr(RowByRow, "copies", lambda self, count: rows.append(count) or original(self, count))
    model = pictures()
    half, step = PLACES // 2, dp_sgd(model, batch_size=PLACES)
    sizes = list(range(half, PLACES + 1, BETWEEN))
    assert rows[-len(sizes) :] == [PLACES, *sizes[:-1]] and sorted(step._clipped_sums.engine._graphs) == sizes
    calls = []
    for units, graph in step._clipped_sums.engine._graphs.items():
        counted = lambda *given, units=units, graph=graph: calls.append((units, given[0].shape[0])) or graph(*given)  # noqa: E731
        step._clipped_sums.engine._graphs[units] = counted
    for size in (3, half + 1, half + 2 * BETWEEN, half + 2 * BETWEEN + 1, PLACES):
        step.clipped_sum(*batch(model, size), 1.0)
    assert calls == [(half + more, half + more) for more in (0, BETWEEN, 2 * BETWEEN, 3 * BETWEEN, half)]


@pytest.mark.slow
def test_what_is_not_finite_contributes_zero():
    model = pictures()
    step, (x, y) = dp_sgd(model, batch_size=PLACES), batch(model, 5)
    expected = step.clipped_sum(np.delete(x, 1, 0), np.delete(y, 1), 0.5)
    for bad in (np.nan, np.inf, 3e38):
        x[1] = bad
        found = step.clipped_sum(x, y, 0.5)
        assert found.non_finite == 1 and relative_error(found.sums, expected.sums) < TOLERANCE


class TestOthersAreComputedAsBefore:
    def of(self, model, **options):
        step, (x, y) = dp_sgd(model, **({"batch_size": PLACES} | options)), batch(model, 5)
        found = step.clipped_sum(x, y, 0.5)
        expected = brute_force(model, x, y, 0.5 / (1 + step.overstatement))
        assert relative_error(found.sums, expected) < TOLERANCE
        return forms(step)

    @pytest.mark.slow
    def test_more_rows_than_a_graph_has_copies_for(self):
        assert self.of(pictures(), batch_size=80) == {"one-hot", "gather", "dense"}

    @pytest.mark.slow
    def test_a_model_that_is_no_plain_chain_of_layers(self):
        convolution = layers.Conv2D(6, 3, activation="softplus")
        found = self.of(functional((60, 60, 1), lambda x: head(layers.AveragePooling2D(4)(convolution(x)))))
        assert found == {"loop", "dense"}

    @pytest.mark.slow
    def test_small_pictures(self):
        assert "row by row" not in self.of(pictures(size=20))

    @pytest.mark.slow
    def test_layers_behind_one_with_other_weights(self):
        found = self.of(
            keras.Sequential(
                [
                    keras.Input((60, 60, 1)),
                    layers.LayerNormalization(),
                    layers.Conv2D(6, 3, activation="softplus"),
                    layers.AveragePooling2D(8),
                    layers.Flatten(),
                    layers.Dense(5, activation="softmax"),
                ]
            )
        )
        assert found == {"normalization", "loop", "dense"}

    @pytest.mark.slow
    def test_a_model_that_draws(self):
        """Behind its first layers, which are computed as they were traced: nothing need be tried of them."""
        model = pictures(layers.Dropout(0.5), layers.Conv2D(4, 3, padding="same"))
        step, (x, y) = dp_sgd(model, batch_size=PLACES), batch(model, 5)
        found = step.clipped_sum(x, y, 0.5)
        assert "row by row" in forms(step) and 0 < norm(found.sums) <= 5 * 0.5
