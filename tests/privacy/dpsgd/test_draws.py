"""Models that draw random numbers are tried too: drawing does not excuse a gradient that depends on its place.

The order of TensorFlow's sum over positions depends on where in memory an example begins, unless its channels are a
multiple of 8. The server chooses weights by which dropout has no effect and the last bit of that sum is amplified.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import batch, dp_sgd, first_moves, untried
from support import mostly_slow

from cloister.privacy.dpsgd import in_rows
from cloister.privacy.dpsgd.parts import added_up, fingerprints
from cloister.privacy.dpsgd.reductions import chained_sums
from cloister.privacy.dpsgd.trial_calls import CallMode

layers = keras.layers


def network(channels=12):
    keras.utils.set_random_seed(3)
    first = (layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(2), layers.Dropout(0.25))
    rest = (layers.Conv2D(channels, 3, activation="relu"), layers.GlobalAveragePooling2D())
    return keras.Sequential([keras.Input((28, 28, 1)), *first, *rest, layers.Dense(10, activation="softmax")])


def steep(model, seed):
    """The mean over positions is nothing but the biases, and behind it all but their roundings cancels."""
    rng = np.random.default_rng(seed)
    first, second, top = (layer for layer in model.layers if layer.trainable_variables)
    biases = rng.uniform(1, 2, second.bias.shape).astype(np.float32)
    first.set_weights([np.zeros(first.kernel.shape), -np.ones(first.bias.shape)])
    second.set_weights([np.zeros(second.kernel.shape), biases])
    kernel, exact = rng.standard_normal(top.kernel.shape), biases.astype(float)
    kernel -= exact[:, None] * (exact @ kernel) / (exact @ exact)
    top.set_weights([2.0**35 * kernel, np.zeros(top.bias.shape)])


def farthest(step, seeds, chosen=steep):
    """How far one example moves the sum, in S, under weights that are chosen."""
    x, y = batch(step.model, 16, seed=2)
    moves = []
    for seed in seeds:
        chosen(step.model, seed)
        moves.append(first_moves(step, x, y))
    return max(moves)


@pytest.fixture
def as_tensorflow_adds_up(monkeypatch):
    """A twin whose sums over positions are left as they are, and are not looked for."""
    monkeypatch.setattr(in_rows, "even_sums", chained_sums)
    monkeypatch.setattr(in_rows, "uneven_operations", lambda graph: [])


@pytest.mark.slow
def test_dropout_does_not_hide_that_a_gradient_depends_on_its_place(as_tensorflow_adds_up):
    step = dp_sgd(network(), batch_size=16)
    assert step.method == "in turn"
    assert 0 < farthest(step, range(4)) <= 1


@pytest.mark.slow
def test_a_gradient_does_not_depend_on_its_place():
    step = dp_sgd(network(), batch_size=16)
    assert step.method == "rows"
    assert 0 < farthest(step, range(4)) <= 1


@pytest.mark.slow
def test_without_the_trial_one_example_moves_the_sum_by_more_than_the_bound(as_tensorflow_adds_up, monkeypatch):
    untried(monkeypatch)
    assert farthest(dp_sgd(network(), batch_size=16), range(4)) > 1.2


def text():
    """A convolution shared by two parts of a text, and the largest of each filter's numbers over each part."""
    keras.utils.set_random_seed(3)
    inputs, convolution = keras.Input((1, 40), dtype="int32"), layers.Conv2D(13, (1, 3), activation="relu")
    embedded, largest = layers.Embedding(50, 9)(inputs), layers.GlobalMaxPooling2D()
    both = layers.Concatenate()([largest(convolution(embedded[:, :, :13])), largest(convolution(embedded[:, :, 13:]))])
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(both))


def off_by_a_bit(array, places, ups):
    """The array with the last bit of a few numbers changed."""
    flat = array.reshape(-1)
    for place, up in zip(places, ups, strict=True):
        flat[place] = np.nextafter(flat[place], np.inf if up else -np.inf, dtype=flat.dtype)
    return array


PLACES_OF_BITS = {
    "one": [([17], [1]), ([], [])],
    "one of the second": [([], []), ([3], [1])],
    "one of each, in opposite directions": [([3], [1]), ([3], [0])],
    "four, of which the changes add up to zero": [([0, 1, 2, 3], [1, 0, 0, 1]), ([], [])],
}


@pytest.mark.parametrize("changes", PLACES_OF_BITS.values(), ids=PLACES_OF_BITS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_fingerprint_shows_a_last_bit(changes, dtype):
    rng = np.random.default_rng(0)
    held = [rng.uniform(1.1, 1.9, shape).astype(dtype) for shape in ((300, 5), (7,))]
    other = [off_by_a_bit(array.copy(), *change) for array, change in zip(held, changes, strict=True)]
    first, second = fingerprints([tf.constant(np.stack(rows)) for rows in zip(held, other, strict=True)]).numpy()
    assert first != second


def test_a_fingerprint_shows_an_exchange_and_two_signs_and_not_the_sign_of_zero():
    rows = np.array([[1, 2, 3], [2, 1, 3], [-1, -2, 3]], np.float32)
    assert len(set(fingerprints([tf.constant(rows)]).numpy())) == 3
    assert len(set(fingerprints([tf.constant([[0.0, -0.0], [-0.0, 0.0]])]).numpy())) == 1


def pictures(rate):
    """Of convolutions whose filters are no multiple of 8, without a mean over positions."""
    first = (layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(2), layers.Dropout(rate))
    rest = (layers.Conv2D(12, 3, activation="relu"), layers.Flatten(), layers.Dense(3, activation="softmax"))
    return keras.Sequential([keras.Input((16, 16, 1)), *first, *rest])


def sequences():
    """A dense layer of positions, whose gradients are held one by one."""
    inner = (layers.Dense(10, activation="tanh"), layers.Flatten(), layers.Dense(3, activation="softmax"))
    return keras.Sequential([keras.Input((64, 5)), *inner])


TOGETHER = {
    "a mean of 16 channels": (lambda: network(16), 1),
    "a text": (text, 1),
    "12 filters": (lambda: pictures(0.25), 1),
    "12 filters, in groups": (lambda: pictures(0.25), 20),
    "positions": (sequences, 1),
}


@pytest.mark.parametrize("case", mostly_slow(TOGETHER, []))
def test_models_that_have_one_gradient_at_every_place_are_computed_together(case):
    build, cap = TOGETHER[case]
    step = dp_sgd(build(), batch_size=16, group_cap=cap)
    assert step.method == "rows" and step._clipped_sums.engine.places >= 16


def test_in_a_trial_all_examples_use_the_same_random_numbers():
    hidden = layers.Dense(16), layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3, activation="softmax")])
    step, (x, y) = dp_sgd(model, batch_size=2, microbatch_size=2), batch(model, 1)
    rows, seeds = step._clipped_sums.engine, np.zeros((1, 2), np.int64)
    every, labels, mask = np.repeat(x, rows.places, 0), np.repeat(y, rows.places, 0), np.ones((rows.places, 1), bool)
    modes = (CallMode.SHARED_DRAWS, CallMode.SHARED_DRAWS, CallMode.TRAINING)
    norms = [rows._call(every, labels, mask, 1.0, seeds, mode=mode).norms.numpy() for mode in modes]
    assert len({*norms[0].round(4), *norms[1].round(4)}) == 1
    assert len({*norms[2].round(4)}) > 1


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_a_sum_over_positions_is_the_same_wherever_a_row_stands(dtype):
    for positions, channels in ((9, 10), (49, 12), (64, 50), (100, 3), (196, 33)):
        one = np.random.default_rng(0).standard_normal((1, positions, channels))
        found = added_up(tf.constant(np.repeat(one, 16, 0), dtype)).numpy()
        assert (found == found[0]).all()
        np.testing.assert_allclose(found[0], one[0].sum(0), rtol=1e-4, atol=1e-4)
    assert added_up(tf.ones([2, 3, 4, 5], dtype)).shape == (2, 4, 5)
