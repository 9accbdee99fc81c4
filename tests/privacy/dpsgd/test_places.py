"""Places in rows: no unit has a say in where another one is computed, or in a bit of what is held of it.

The server chooses weights by which the last bit of a sum decides about the direction of a gradient. Then a unit that is
computed at another place can have quite another gradient.
"""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    MODELS,
    TURNS,
    BatchMean,
    Reversed,
    Scaled,
    batch,
    compile_nothing,
    coupled,
    dp_sgd,
    functional,
    head,
    moved,
    norm,
    perturbed,
    residuals,
    small,
)
from support import failures, mostly_slow

from cloister.audits import keras_kernels as kernels
from cloister.privacy.dpsgd import batches, checks, in_rows, in_turn
from cloister.privacy.dpsgd.batches import Draws, places_of
from cloister.privacy.dpsgd.clipped_sums import EMPTY, ClippedSums, Sums
from cloister.privacy.dpsgd.tracing import as_traced

layers = keras.layers
BATCH = 16


def excited(channels=12):
    """A gate of each channel, by which a product is broadcast over positions, before a maximum over them."""

    def inner(x):
        for _ in range(3):
            x = layers.Conv2D(channels, 3, padding="same", activation="relu", trainable=False)(x)
        gate = layers.Dense(4, activation="relu")(layers.GlobalMaxPooling2D()(x))
        gate = layers.Reshape((1, 1, channels))(layers.Dense(channels, activation="sigmoid")(gate))
        x = layers.GlobalMaxPooling2D()(layers.Multiply()([x, gate]))
        return layers.Dense(10, activation="softmax")(x)

    return functional((8, 8, 3), inner)


def open_gate(model, rng):
    *first, last, narrow, wide, top = (layer for layer in model.layers if layer.weights)
    channels = last.filters
    for layer in first:
        layer.set_weights([np.zeros(weight.shape) for weight in layer.get_weights()])
    last.set_weights([np.zeros(last.kernel.shape), np.full(channels, rng.uniform(1, 2))])
    signs = np.where(np.arange(channels) % 2, 1, -1)
    top.set_weights([signs[:, None] * rng.standard_normal(10) * 2.0**-30, np.zeros(10)])
    narrow.set_weights([np.zeros(narrow.kernel.shape), np.full(4, 2.0**-110)])
    kernel = np.round(rng.standard_normal((4, channels)) * 64) / 64
    kernel[:, -1] -= (kernel @ signs) * signs[-1]
    wide.set_weights([2.0**75 * kernel, np.zeros(channels)])


def saturated(channels=12):
    """A mean over positions, of which nothing shows below the threshold of the layer behind it."""
    first = (
        layers.Conv2D(8, 3, activation="relu", trainable=False),
        layers.MaxPooling2D(2),
        layers.Conv2D(channels, 3, activation="relu", trainable=False),
    )
    rest = (layers.GlobalAveragePooling2D(), layers.ReLU(threshold=1e6), layers.Dense(10, activation="softmax"))
    return keras.Sequential([keras.Input((28, 28, 1)), *first, *rest])


def above_threshold(model, rng):
    first, second, top = (layer for layer in model.layers if layer.weights)
    first.set_weights([rng.standard_normal(first.kernel.shape) / 3, rng.uniform(0, 1, first.bias.shape)])
    ulp = np.spacing(np.float32(1))
    kernel = rng.standard_normal(second.kernel.shape)
    second.set_weights([2e7 * ulp * kernel, np.full(second.bias.shape, 1.3e7)])
    kernel = rng.standard_normal(top.kernel.shape).astype(np.float32)
    kernel -= kernel.mean(axis=0)
    top.set_weights([2.0**35 / 1e7 * kernel, -(2.0**35) * 1.3 * kernel.astype(np.float64).sum(axis=0)])


def dropping(channels=12):
    first = (layers.Conv2D(8, 3, activation="relu", trainable=False), layers.MaxPooling2D(2), layers.Dropout(0.25))
    rest = (layers.Conv2D(channels, 3, activation="relu", trainable=False), layers.GlobalAveragePooling2D())
    return keras.Sequential([keras.Input((28, 28, 1)), *first, *rest, layers.Dense(10, activation="softmax")])


def steep(model, rng):
    """The mean over positions is nothing but the biases, and behind it all but their roundings cancels."""
    first, second, top = (layer for layer in model.layers if layer.weights)
    biases = rng.uniform(1, 2, second.bias.shape).astype(np.float32)
    first.set_weights([np.zeros(first.kernel.shape), -np.ones(first.bias.shape)])
    second.set_weights([np.zeros(second.kernel.shape), biases])
    kernel, exact = rng.standard_normal(top.kernel.shape), biases.astype(float)
    kernel -= exact[:, None] * (exact @ kernel) / (exact @ exact)
    top.set_weights([2.0**35 * kernel, np.zeros(top.bias.shape)])


def swinging():
    inner = (layers.Dense(13), layers.LayerNormalization(), layers.Activation(tf.sin))
    return keras.Sequential([keras.Input((13,)), *inner, layers.Dense(5, activation="softmax")])


def fast(model, rng):
    model.layers[0].set_weights([rng.standard_normal(weight.shape) for weight in model.layers[0].get_weights()])
    model.layers[1].gamma.assign(np.full(13, 1e9))


HOSTILE = {
    "a gate": (excited, open_gate),
    "a threshold": (saturated, above_threshold),
    "dropout": (dropping, steep),
    "a swing": (swinging, fast),
}


def farthest(name):
    """How far the first example moves the sum of a batch, in S, at most, under weights that are chosen."""
    build, choose = HOSTILE[name]
    keras.utils.set_random_seed(3)
    step = dp_sgd(build(), batch_size=BATCH)
    assert step.method == "rows"
    moves = []
    for seed in range(6):
        choose(step.model, np.random.default_rng(seed))
        moves.append(moved(step, *batch(step.model, BATCH, seed=2), seed=seed))
    return max(moves)


@pytest.mark.parametrize("name", mostly_slow(HOSTILE, ["a swing"]))
def test_one_example_moves_the_sum_by_the_bound_at_most(name):
    assert 0 < farthest(name) <= 1


@pytest.mark.slow
def test_places_by_rank_are_caught(monkeypatch):
    """One unit more shifts all behind it, as in versions that filled calls in order."""

    def by_rank(step, x, y, bound=1.0, leaving=0, seed=0):
        step.reseed(seed)
        step._clipped_sums.draws.places = lambda units, room: list(range(units))
        sums = [step.clipped_sum(x[start:], y[start:], bound).sums for start in (0, 1)]
        return norm([a.astype(np.float64) - b for a, b in zip(*sums, strict=True)]) / bound

    monkeypatch.setitem(globals(), "moved", by_rank)
    if all(farthest(name) <= 1 for name in HOSTILE):
        pytest.skip("on this processor these networks compute every place alike")


def others_differ(step, cases):
    """How often a bit of what is held of one unit changes with the data of the others, in calls of one shape."""
    trial = kernels.Trial(step._clipped_sums.engine, seed=1)
    for _ in range(cases):
        trial.case()
    return trial.changed


@pytest.mark.parametrize("name", mostly_slow(MODELS, ["sequence"]))
def test_no_bit_of_a_unit_depends_on_the_others(name):
    step = dp_sgd(MODELS[name]())
    assert step.method == "rows" and others_differ(step, 20) == 0


def test_a_layer_that_adds_a_batch_mean_is_caught(monkeypatch):
    monkeypatch.setattr(checks, "prove", lambda *_: None)
    monkeypatch.setattr(in_rows, "prove", lambda *_: None)
    monkeypatch.setattr(in_rows, "labels", lambda *given: [in_rows.Rows(0) for _ in given[-1]])
    step = dp_sgd(small(layers.Dense(4), BatchMean()))
    assert step.method == "rows" and others_differ(step, 20) > 0


def test_a_unit_that_leaves_takes_no_bit_of_the_others_along():
    """The sum without it is that of the others alone: its factor is 0, and the rest is added in one order."""
    step = dp_sgd(perturbed(MODELS["sequence"]()))
    x, y = batch(step.model, 7)
    x[3] = np.nan
    with_it, without = coupled(step, x, y, 0.5, leaving=3)
    assert all(np.array_equal(a, b) for a, b in zip(with_it, without, strict=True))


class TestTheLot:
    def test_gives_every_choice_of_places_the_same_probability(self):
        draws, counts = Draws(0), np.zeros((5, 5), int)
        for _ in range(20_000):
            first, second = draws.places(2, 5)
            counts[first, second] += 1
        assert not counts.diagonal().any()
        apart = counts[~np.eye(5, dtype=bool)]
        assert apart.size == 20 and np.abs(apart - 1000).max() < 5 * np.sqrt(1000)

    def test_is_drawn_from_the_operating_system(self):
        assert Draws().places(40, 90) != Draws().places(40, 90)
        assert Draws(1).places(40, 90) == Draws(1).places(40, 90)

    def test_gives_each_unit_one_place_in_calls_of_one_shape(self, monkeypatch):
        monkeypatch.setattr(in_rows, "most_at_once", lambda batch_size: 10)
        own = dp_sgd(functional((4,), head))._clipped_sums
        for count in (0, 1, 5, 41, 42, 60):
            calls = list(own._calls(count))
            assert sorted(number for call in calls for number in call if number != EMPTY) == list(range(count))
            assert all(len(call) == own.engine.places == 9 for call in calls)
            assert len(calls) <= -(-max(places_of(8), count) // 9)

    def test_calls_hold_no_more_of_units_than_memory_has_room_for(self, monkeypatch):
        whole = dp_sgd(MODELS["embedding"]())._clipped_sums.engine
        monkeypatch.setattr(batches, "MEMORY", 20_000)
        step = dp_sgd(MODELS["embedding"]())
        assert 1 < step._clipped_sums.engine.places < whole.places
        assert step.clipped_sum(*batch(step.model, 12), 1.0).examples == 12


class TestRounds:
    @pytest.mark.parametrize("at_once", [1, 4, 30])
    def test_have_each_unit_once_in_the_row_of_its_place(self, at_once):
        occupied = np.flatnonzero(np.random.default_rng(0).random(30) < 0.5)
        table, real = in_rows.rounds(occupied, at_once)
        assert np.array_equal(np.sort(table[real]), occupied) and np.isin(table, occupied).all()
        assert np.array_equal(table[real] % at_once, np.nonzero(real)[1])
        assert len(table) == np.bincount(occupied % at_once).max()

    def test_leave_the_rows_of_others_when_a_unit_joins(self):
        rows = []
        for occupied in ([1, 5, 9, 40], [1, 5, 8, 9, 40]):
            table, real = in_rows.rounds(np.array(occupied), 4)
            rows.append(dict(zip(table[real], np.nonzero(real)[1], strict=True)))
        assert rows[0] == {place: row for place, row in rows[1].items() if place != 8}


EQUAL = MODELS | TURNS | {"residuals": residuals, "own": lambda: small(Scaled(), Reversed())}
del EQUAL["normalized"]  # others have its layers


def equal_calls(model, calls):
    """The method of a model, and whether so many calls of its graph give one sum; none after two that differ."""
    step, given = dp_sgd(perturbed(model)), []
    engine = step._clipped_sums.engine
    graph, engine._compiled = engine._compiled, lambda *inputs: given.append(inputs) or graph(*inputs)
    step.clipped_sum(*batch(step.model, 8 if step.method == "in turn" else 4), 0.5)

    def call():
        anew = tf.nest.map_structure(tf.identity, given[0])  # in other memory
        return b"".join(array.numpy().tobytes() for array in tf.nest.flatten(graph(*anew)))

    with as_traced():
        first = call()
        return step.method, all(call() == first for _ in range(calls))


@pytest.mark.slow(minutes=1)
def test_equal_calls_give_equal_sums():
    """Three to nine of 100 sums differ if timing decides their order."""

    def check(name):
        assert equal_calls(EQUAL[name](), 1000)[1]

    assert not failures(EQUAL, check)


@pytest.mark.slow
def test_those_of_sums_in_no_order_do_not(monkeypatch):
    """In turn, most often the first hundred calls show it."""
    for module in (in_turn, in_rows, checks):
        monkeypatch.setattr(module, "chained_sums", nullcontext)
    monkeypatch.setattr(in_turn, "refuse_effects", lambda *_: None)
    assert equal_calls(residuals(), 3000) == ("in turn", False)


@pytest.mark.long
@pytest.mark.parametrize("name", EQUAL)
def test_so_do_ten_thousand(name):
    assert equal_calls(EQUAL[name](), 10_000)[1]


class LooksUp(layers.Layer):
    """Looks a row of a table up by a number that it computes; it raises an exception where there is none."""

    def __init__(self, number):
        super().__init__()
        self.number, self.dropout = number, layers.Dropout(0.5)

    def call(self, x):
        return tf.gather(tf.eye(6), self.number(self, x))

    def compute_output_shape(self, shape):
        return (*shape[:-1], 6)


def of_draws(layer, x):
    """One of two numbers; there is a row for the first."""
    return 5 * tf.cast(layer.dropout(tf.ones_like(x), training=True)[:, 0], tf.int32)


def of_floats(layer, x):
    return tf.cast(x[:, 0], tf.int32)


def of_places(layer, x):
    return x[:, 0] + tf.range(tf.shape(x)[0])


def of_pairs(layer, x):
    return x[:, 0] + x[::-1, 0]


class LooksUpInVain(LooksUp):
    """Uses the shape alone of what it looks up."""

    def call(self, x):
        return keras.ops.cast(x, "float32") + tf.raw_ops.ZerosLike(x=tf.gather(tf.ones((6, 3)), self.number(self, x)))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


class GathersInVain(LooksUpInVain):
    """Uses the shape alone of what an operation without a rule looks up."""

    def call(self, x):
        shape = tf.raw_ops.ZerosLike(x=tf.gather_nd(tf.ones(6), self.number(self, x)[:, None]))
        return keras.ops.cast(x, "float32") + shape[:, None]


class DividesInVain(LooksUpInVain):
    """Uses the shape alone of what it divides."""

    def call(self, x):
        number = self.number(self, x)
        shape = tf.raw_ops.ZerosLike(x=tf.truncatediv(tf.ones_like(number), number))
        return keras.ops.cast(x, "float32") + keras.ops.cast(shape, "float32")[:, None]


RAISING = {
    "a gather that no layer makes": lambda: functional((3,), lambda x: head(GathersInVain(of_pairs)(x)), "int32"),
    "a division": lambda: functional((3,), lambda x: head(DividesInVain(of_pairs)(x)), "int32"),
    "numbers that were drawn": lambda: functional((3,), lambda x: head(LooksUp(of_draws)(x))),
    "numbers that were rounded": lambda: functional((3,), lambda x: head(LooksUp(of_floats)(x))),
    "the place": lambda: functional((3,), lambda x: head(LooksUp(of_places)(x)), "int32"),
    "pairs of units": lambda: functional((3,), lambda x: head(LooksUpInVain(of_pairs)(x)), "int32"),
}


def test_an_exception_that_a_copy_at_another_place_could_raise_keeps_a_model_from_rows(monkeypatch):
    compile_nothing(monkeypatch)

    def check(name):
        assert dp_sgd(RAISING[name]()).method == "in turn"

    assert not failures(RAISING, check)


def test_one_that_a_units_own_numbers_raise_does_not():
    for dtype in ("int32", "int64", "uint8"):
        model = functional((3,), lambda x: head(layers.Flatten()(layers.Embedding(6, 2)(x))), dtype)
        step = dp_sgd(model)
        x = np.zeros((5, 3), dtype)
        x[2] = 100
        found = step.clipped_sum(x, np.zeros(5, int), 1.0)
        assert step.method == "rows" and found.non_finite == 1, dtype


@pytest.mark.slow
def test_whether_a_unit_raises_an_exception_depends_on_no_other(monkeypatch):
    """Half of all masks raise one. If units were given others when one raised, a third of the units would."""
    monkeypatch.setattr(in_turn, "CONVOLUTION", "")  # of every graph: XLA, which such graphs go without, raises none

    def inner(x):
        own = LooksUp(of_draws)(x)
        return head(layers.Concatenate()([own, layers.Dense(3)(x)]))

    step = dp_sgd(functional((3,), inner))
    x, y = np.ones((8, 3), np.float32), np.zeros(8, int)
    failed = sum(step.clipped_sum(x, y, 1.0).non_finite for _ in range(100))
    assert step.method == "in turn" and abs(failed - 400) < 6 * np.sqrt(800) / 2


class RaisesAtOne:
    """An engine in rows that raises an exception for a unit of ones, and notes what decides random numbers."""

    in_fixed_places, places, threads, overstatement = True, 64, 1, 0.0

    def __init__(self):
        self.calls = []

    def seeds(self, draws):
        return draws.seeds(4, 1)

    def __call__(self, call):
        self.calls.append((call.seeds.tobytes(), call.taken.tolist()))
        if call.x.any():
            raise ValueError
        return Sums([np.zeros(3)], 0, 0)


def test_random_numbers_of_the_others_stay_if_a_unit_raises_an_exception():
    """Else two halves of a call would share them, which tells that the unit is there."""
    engine, x = RaisesAtOne(), np.zeros((6, 3), np.float32)
    x[2] = 1
    sums = ClippedSums(engine, [np.zeros(3)], (np.zeros((3, 3), np.float32), np.zeros(3)), 2, 1)
    assert sums.of(x, np.zeros(6), 1.0).non_finite == 1
    assert len(engine.calls) > 3 and len({str(call) for call in engine.calls}) == 1 and len(engine.calls[0][1]) == 6
