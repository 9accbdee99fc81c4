"""Models whose layers are really given other shapes than Keras says."""

import keras
import numpy as np
import pytest
from examples_of_dpsgd import LOSS, batch, dp_sgd, first_moves, functional, norm
from support import mostly_slow
from test_known_layers import KNOWN, SHIPPED, sum_of_two

from cloister.core.errors import UnsupportedModel
from cloister.privacy.dpsgd import checks, known_layers
from cloister.privacy.dpsgd.known_layers import keeps_examples_apart
from cloister.privacy.dpsgd.strides import stride
from cloister.privacy.dpsgd.trials import ModelTrials

layers = keras.layers
COUNT = max(stride(), 2)
pytestmark = pytest.mark.known_layers


def pairs(own, of_each):
    """The largest difference of something of each example and of something that is said to have one row for each.

    If that has one row more in front, or none, Keras gives all differences of two examples, and says nothing.
    """

    def inner(x):
        row = layers.Reshape((1, 4))(layers.Dense(4)(x))
        difference = layers.Subtract()([own(x), of_each(row)])
        return layers.Dense(3, activation="softmax")(layers.GlobalMaxPooling1D()(difference))

    return functional((4,), inner)


def with_an_axis_in_front(layer):
    return pairs(layer, layers.Identity())


def for_two_ranks():
    shared = layers.Normalization(axis=1, mean=[0.0], variance=[1.0])
    shared.build((None, 1, 4))
    return pairs(shared, shared)


def reshaping_activations(x):
    row = layers.Activation(layers.Reshape((1, 4)))(layers.Dense(4)(x))
    largest = layers.Activation(layers.GlobalMaxPooling1D())(layers.Subtract()([x, row]))
    return layers.Dense(3, activation="softmax")(largest)


def own_width(x):
    """Adds as many numbers as the input says to those that it has."""
    wide = layers.Dense(COUNT, name="wide")(layers.Dot(axes=1)([x, x]))
    return layers.Dense(3, activation="softmax", name="top")(layers.Add()([wide, x]))


def mean_of_all(threshold=1e12):
    """A mask with an axis too many: the mean is over all examples, and attention repeats it for each."""

    def inner(x):
        row, large = layers.Reshape((1, 4)), layers.ReLU(threshold=threshold)(x)
        mean = layers.GlobalAveragePooling1D()(row(large), mask=np.ones((1, 1, 1), bool))
        seen = layers.Attention()([row(x), layers.Reshape((1, 4))(mean)])
        return layers.Dense(3, activation="softmax", name="top")(layers.Add()([x, layers.Flatten()(seen)]))

    return functional((4,), inner)


OTHERWISE = {
    "a row for all examples": mean_of_all,
    "a scale with axes of its own": lambda: with_an_axis_in_front(layers.Rescaling(np.ones((1, 1, 1), np.float32))),
    "a layer that was built for another rank": for_two_ranks,
    "an activation that adds an axis": lambda: functional((4,), reshaping_activations),
    "a narrower input": lambda: functional(
        (6,), lambda x: layers.Dense(3, activation="softmax")(sum_of_two()([x, layers.Dense(1)(x)]))
    ),
}


def keeps_rows(model, probe=None):
    return ModelTrials(model, LOSS, batch(model, 3) if probe is None else probe).first.keeps_rows()


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_shapes_are_seen(name):
    assert not keeps_rows(OTHERWISE[name]())


RIGHT = KNOWN | SHIPPED


@pytest.mark.parametrize("name", mostly_slow(RIGHT, ["pictures", "within a wrapper", "attention", "nested"]))
def test_those_of_known_models_are_right(name):
    assert keeps_rows(RIGHT[name]())


def test_later_words_may_be_hidden():
    """The mask is one for all examples."""

    def inner(x):
        seen = layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)
        return layers.Dense(3, activation="softmax")(layers.Flatten()(seen))

    assert keeps_rows(functional((6, 4), inner))


def moved_by_narrow_examples(monkeypatch, is_seen):
    """The step of a model that is given single numbers, and how far one example moves its sum, in S."""
    if not is_seen:
        monkeypatch.setattr(checks.Trial, "keeps_rows", lambda self: True)
        monkeypatch.setattr("cloister.privacy.dpsgd.clipped_sums.ClippedSums._are_same_beside_others", lambda *_: True)
    model = functional((COUNT,), own_width)
    step = dp_sgd(model, batch_size=COUNT, probe=(np.ones((3, 1), np.float32), np.arange(3)))
    assert keeps_examples_apart(model, LOSS, 1)
    model.get_layer("wide").set_weights([np.zeros((1, COUNT)), np.full(COUNT, -1.0)])
    model.get_layer("top").set_weights([np.tile([1.0, -1.0, 0.0], (COUNT, 1)), np.zeros(3)])
    x, y = np.full((COUNT, 1), 0.1, np.float32), np.full(COUNT, 2)
    x[0] = 100
    one, other = (step.clipped_sum(x[part], y[part], 1.0).sums for part in (slice(None), slice(1, None)))
    return step, norm([a.astype(float) - b for a, b in zip(one, other, strict=True)])


@pytest.mark.slow
def test_examples_narrower_than_the_input_move_the_sum_by_the_bound_at_most(monkeypatch):
    step, far = moved_by_narrow_examples(monkeypatch, is_seen=True)
    assert 0 < far <= 1 and step._clipped_sums.places == 1


@pytest.mark.skipif(stride() == 1, reason="no number of examples suits this processor: each is computed alone")
def test_if_their_shapes_were_not_looked_at_they_would_move_it_by_more(monkeypatch):
    """Keras takes them for a bias where they are as many as the input says."""
    _, far = moved_by_narrow_examples(monkeypatch, is_seen=False)
    assert far > 2


def moved_by_a_mean_of_all():
    """The step of a model in which numbers that no trial reaches meet, and how far one example moves its sum, in S."""
    model = mean_of_all()
    step = dp_sgd(model, batch_size=16)
    kernel = np.zeros((4, 3))
    kernel[:2] = [[1e-10, -1e-10, 0.0], [-9.0, 9.0, 0.0]]
    model.get_layer("top").set_weights([kernel, np.zeros(3)])
    x = np.zeros((16, 4), np.float32)
    x[1:, 1], x[0] = 1.0, [1e13, 0.0, 0.0, 0.0]
    return step, first_moves(step, x, np.full(16, 2))


def test_a_mean_of_all_examples_is_refused():
    with pytest.raises(UnsupportedModel, match=r"GlobalAveragePooling1D.*changes with the other examples"):
        moved_by_a_mean_of_all()


@pytest.mark.skipif(stride() == 1, reason="no number of examples suits this processor: each is computed alone")
@pytest.mark.long
def test_if_its_mask_and_shapes_were_taken_for_known_one_example_would_move_the_sum_by_more(monkeypatch):
    monkeypatch.setattr(known_layers, "OPTION", object)
    monkeypatch.setattr(checks.Trial, "keeps_rows", lambda self: True)
    _, far = moved_by_a_mean_of_all()
    assert far > 2
