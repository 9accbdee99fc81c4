"""Layers that couple examples are found, whatever hides them."""

import keras
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    BatchMean,
    Folded,
    batch,
    dp_sgd,
    functional,
    head,
    small,
)
from support import mostly_slow

from cloister.core.errors import UnsupportedModel
from cloister.privacy.dpsgd import trials
from cloister.privacy.dpsgd.probe import made_up
from cloister.privacy.dpsgd.trial_weights import moved

layers = keras.layers


class FromTheOneBefore(keras.Layer):
    """Couples each example with the one in front of it: the first one with none."""

    def call(self, x):
        return x + keras.ops.concatenate([keras.ops.zeros_like(x[:1]), x[:-1]])


class CoupledByWeight(keras.Layer):
    """Couples examples as far as a weight says, which a server sends, whether it is trained or not."""

    def __init__(self, trained=True):
        super().__init__()
        self.trained = trained

    def build(self, shape):
        self.share = self.add_weight(shape=(1,), initializer="zeros", name="share", trainable=self.trained)

    def call(self, x):
        return x + keras.ops.relu(self.share) * keras.ops.mean(x, axis=0, keepdims=True)


def assert_the_first_trial_passes(model):
    """That of gradients alone."""
    trials.ModelTrials(model, LOSS, made_up(model)).first.refuse_coupling(trials.FACTORS_OF_OTHERS)


def deep(coupled):
    """Behind many layers with large biases all examples look alike, and a layer that is off hides the rest."""

    def inner(x):
        x = layers.Rescaling(1 / 255)(x)
        for _ in range(5):
            x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
        x = coupled(layers.Dense(16, activation="relu")(layers.GlobalAveragePooling2D()(x)))
        return layers.Dense(5, activation="softmax")(layers.Dense(16, activation="relu", name="off")(x))

    keras.utils.set_random_seed(0)  # under some other weights a factor of 10¹⁰ shows it
    model = functional((12, 12, 1), inner)
    off = model.get_layer("off")
    off.bias.assign(off.bias - 1e6)
    return model


def of_text(coupled):
    """Numbers that made-up examples do not reach switch the branch on that couples them. NaN cannot be given to it."""

    def inner(x):
        x = layers.Dense(16, activation="relu")(layers.Flatten()(layers.Embedding(7, 4)(x)))
        off = layers.ReLU(threshold=1e3)(layers.Dense(16)(coupled(x)))
        return layers.Dense(5, activation="softmax")(layers.Concatenate()([x, off]))

    return functional((3,), inner, "int32")


class Median(layers.Layer):
    """Couples five examples or more."""

    def call(self, x):
        return x - (keras.ops.median(x, axis=0, keepdims=True) if (x.shape[0] or 0) > 4 else 0.0)


class LogMean(layers.Layer):
    """Has no number for half of what is given to it."""

    def call(self, x):
        return keras.ops.log(x) - keras.ops.mean(keras.ops.log(x), axis=0, keepdims=True)


class Centred(layers.Layer):
    """Made of operations that are no layers."""

    def __call__(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


COUPLED_LAYERS = (
    (deep, layers.UnitNormalization, {"axis": 0}),
    (deep, BatchMean, {}),
    (deep, FromTheOneBefore, {}),
    (of_text, layers.UnitNormalization, {"axis": 0}),
    (of_text, layers.Softmax, {"axis": 0}),
    (of_text, Median, {}),
    (of_text, LogMean, {}),
)


@pytest.mark.known_layers
@pytest.mark.parametrize(("build", "kind", "options"), mostly_slow(COUPLED_LAYERS, COUPLED_LAYERS[2:4]))
def test_each_layer_by_itself_shows_coupling_that_others_hide(build, kind, options):
    """Accepted, one example moved the sum by 15.5 S, and by 7.5 to 11.8 S behind thresholds."""
    with pytest.raises(UnsupportedModel, match=f"{kind.__name__}.*changes with the other examples of its batch"):
        dp_sgd(build(kind(**options)))
    assert_the_first_trial_passes(build(kind(**options)))


class Rows(layers.Layer):
    """Given something with as many rows as a trial has examples, and mixes them."""

    def build(self, shape):
        self.table = layers.UnitNormalization(axis=0)

    def call(self, x):
        return x + keras.ops.sum(self.table(keras.ops.ones((3, x.shape[-1]))), axis=0)


RIGHT = {
    "a mask": lambda: small(
        layers.Dense(4), layers.GaussianNoise(0.1), layers.Reshape((2, 2)), layers.Masking(), layers.Flatten()
    ),
    "attention": lambda: functional((3, 4), lambda x: head(layers.Flatten()(layers.MultiHeadAttention(1, 4)(x, x)))),
    "rows of something else": lambda: small(layers.Dense(4), Rows()),
    "positions as examples": lambda: functional((3, 6), lambda x: head(Folded()(x))),
    "examples along another axis": lambda: functional(
        (22, 4), lambda x: head(layers.Flatten()(keras.ops.transpose(keras.ops.transpose(x, (1, 0, 2)), (1, 0, 2))))
    ),
    "an embedding within a wrapper": lambda: functional(
        (3, 4), lambda x: head(layers.Flatten()(layers.TimeDistributed(layers.Embedding(7, 2))(x))), "int32"
    ),
    "a model within": lambda: small(keras.Sequential([layers.Dense(4), layers.LayerNormalization()])),
}


@pytest.mark.known_layers
@pytest.mark.parametrize("name", mostly_slow(RIGHT, ["rows of something else"]))
def test_layers_that_couple_nothing_are_accepted(name):
    # Masks are not known, and what is not known could write the states that noise is drawn from.
    as_a_whole = ("positions as examples", "a mask")
    assert dp_sgd(RIGHT[name]()).method == ("model" if name in as_a_whole else "layers")


@pytest.mark.known_layers
@pytest.mark.parametrize("build", [deep, of_text])
def test_so_does_each_operation_between_layers(build):
    """Accepted, one example moved the sum by 15.7 S."""
    with pytest.raises(UnsupportedModel, match=r"Mean.*changes with the other examples of its batch"):
        dp_sgd(build(Centred()))


@pytest.mark.known_layers
def test_so_does_the_loss():
    """One that three examples never reach: accepted, one of 48 moved the sum by 4.7 S."""

    def capped(y, p):
        losses = LOSS(y, p)
        return keras.ops.minimum(losses, 5 * keras.ops.mean(losses))

    model = small(layers.Dense(4))
    with pytest.raises(UnsupportedModel, match=r"the loss: .*changes with the other examples of its batch"):
        dp_sgd(model, loss=capped, probe=batch(model, 3))


@pytest.mark.parametrize("trained", [True, False])
def test_coupling_that_a_weight_switches_off_in_the_first_trial_is_found(trained):
    model = small(layers.Dense(5, activation="tanh"), CoupledByWeight(trained))
    share = next(variable for variable in model.variables if variable.path.endswith("share"))
    trained_ones = [variable.path for variable in model.trainable_variables]
    # What the first trial moves weights by is known: there it is below zero.
    move = moved(share, trained_ones.index(share.path)) - share.value if trained else 0.0
    share.assign(share.value - move - 1.0)
    assert_the_first_trial_passes(model)
    with pytest.raises(UnsupportedModel, match="other examples"):
        dp_sgd(model)


def test_coupling_is_found_beside_a_branch_with_huge_outputs(monkeypatch):
    """The other branch's outputs are 10⁷. Accepted, one example moved the sum by 13.8 S later."""

    def inner(x):
        far, coupled = layers.Dense(16, name="far")(x), layers.UnitNormalization(axis=0)(layers.Dense(16)(x))
        return layers.Dense(5, activation="softmax", name="top")(layers.Concatenate()([far, coupled]))

    model = functional((8,), inner)
    far, top = model.get_layer("far"), model.get_layer("top")
    far.bias.assign(far.bias + 1e7)
    top.kernel.assign(tf.zeros_like(top.kernel.value))
    with pytest.raises(UnsupportedModel, match="other examples"):
        assert_the_first_trial_passes(model)
    monkeypatch.setattr(trials, "_each_same_if_finite", trials._same)
    assert_the_first_trial_passes(model)
    with pytest.raises(UnsupportedModel, match="other examples"):
        dp_sgd(model)  # under random weights no branch has huge outputs
