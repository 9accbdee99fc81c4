"""What has no private gradient is refused with a reason, and what cannot be looked at layer by layer is noticed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    LOSS,
    batch,
    brute_force,
    dp_sgd,
    embedding,
    functional,
    group_norm,
    head,
    norm,
    perturbed,
    relative_error,
)
from support import mostly_slow

from cloister.core.errors import ConfigError, UnsupportedModel
from cloister.core.model_state import is_seed
from cloister.privacy.dpsgd import trial_weights, trials
from cloister.privacy.dpsgd.checks import checked
from cloister.privacy.dpsgd.draws import draws_otherwise
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.probe import made_up
from cloister.privacy.dpsgd.trial_weights import moved
from cloister.privacy.mechanisms.noise import GaussianNoise

layers = keras.layers


class BatchMean(keras.Layer):
    """Couples examples, under a name that nobody knows."""

    def call(self, x):
        return x - 0.1 * keras.ops.mean(x, axis=0, keepdims=True)


class MixedNowAndThen(keras.Layer):
    """Couples examples for one random state in ten."""

    def __init__(self, seed):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x):
        mixed = keras.random.uniform((), seed=self.seed_generator) < 0.1
        return x + keras.ops.where(mixed, x[::-1], 0.0)


class DropsAConstant(keras.Layer):
    """Adds a constant of which dropout leaves the same part to every example of a call."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.dropout = rows, layers.Dropout(0.5)

    def call(self, x, training=False):
        return x + self.dropout(keras.ops.ones((self.rows, x.shape[-1])), training=training)[:1]


class MyDropout(layers.Dropout):
    """Anybody's: what it does is not known."""


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


class Scaled(keras.Layer):
    """A weight of its own, used in an ordinary way."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale


class Folded(keras.Layer):
    """A dense layer that is shown positions as if they were examples."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")

    def call(self, x):
        folded = self.dense(keras.ops.reshape(x, (-1, x.shape[-1])))
        return keras.ops.reshape(folded, (-1, *x.shape[1:-1], 4))


class Reversed(keras.Layer):
    """A dense layer that is shown the examples in another order."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")

    def call(self, x):
        return self.dense(x[::-1])[::-1]


class ByHand(keras.Model):
    """A model with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")
        self.top = layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.top(x * self.scale)


def small(*inner):
    def stack(x):
        for layer in inner:
            x = layer(x)
        return head(x)

    return functional((6,), stack)


def normalization():
    learnt = layers.Normalization()
    learnt.adapt(np.ones((4, 6), np.float32))
    return learnt


class RarelyCoupled(keras.Layer):
    """Couples examples where one of them is large."""

    def call(self, x):
        return x + keras.ops.mean(keras.ops.relu(x - 10.0), axis=0, keepdims=True)


class CoupledBelow(keras.Layer):
    """Couples examples where one of them is negative and large."""

    def call(self, x):
        return x - keras.ops.max(keras.ops.relu(-x - 20.0), axis=0, keepdims=True)


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


class Raises(keras.Layer):
    """Works on a batch, and on nothing else."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        if not tf.executing_eagerly():
            raise RuntimeError("patient 17")
        return x * self.scale


def masked_recurrent(unroll=False):
    embedded = layers.Embedding(11, 4, mask_zero=True)
    return functional((5,), lambda x: head(layers.LSTM(4, unroll=unroll)(embedded(x))), "int32")


REFUSED = {
    "RarelyCoupled.*other examples of its batch, and DP-SGD computes": lambda: small(RarelyCoupled()),
    "changes with the other examples": lambda: small(CoupledBelow()),
    "TypeError in a trial.*recurrent layers unroll=True": masked_recurrent,
    "float16, whose norms": lambda: small(layers.Dense(3, dtype="float16")),
    "BatchNormalization.*GroupNormalization": lambda: small(layers.BatchNormalization()),
    "Normalization.*public mean": lambda: small(normalization()),
    "other examples of its batch": lambda: small(BatchMean()),
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


@pytest.mark.known_layers
@pytest.mark.parametrize("reason", mostly_slow(REFUSED, [reason for reason in REFUSED if "recurrent" not in reason]))
def test_refusals_give_the_reason_and_what_to_do(reason):
    with pytest.raises(UnsupportedModel, match=reason):
        dp_sgd(REFUSED[reason]())


@pytest.mark.slow
def test_what_is_refused_with_a_loop_is_right_without():
    model = perturbed(masked_recurrent(unroll=True))
    x, y = batch(model, 5)
    assert relative_error(dp_sgd(model).clipped_sum(x, y, 0.1).sums, brute_force(model, x, y, 0.1)) < 3e-4


def test_an_exception_of_a_trial_is_a_refusal_that_tells_its_type_alone():
    model = ByHand()
    model.top, model.middle = Raises(), layers.Dense(3, activation="softmax")
    model(np.ones((3, 4), np.float32))
    with pytest.raises(UnsupportedModel, match="RuntimeError in a trial") as refusal:
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
    with pytest.raises(UnsupportedModel, match="other examples"):
        dp_sgd(model, loss=loss, probe=(x, y))


def test_a_frozen_batch_normalization_is_a_constant():
    frozen = layers.BatchNormalization()
    model = small(layers.Dense(4), frozen)
    frozen.trainable = False
    assert dp_sgd(model).method == "layers"


def between():
    """A frozen layer that the gradient of a trained one goes through."""
    return functional((6,), lambda x: head(layers.Dense(7, activation="tanh", name="frozen")(layers.Dense(5)(x))))


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


class NeverFinite(layers.Layer):
    """As a root of a weight that random numbers make negative."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(64,), initializer="ones")

    def call(self, x):
        return x * keras.ops.sum(keras.ops.sqrt(self.scale - 0.9))


def test_a_model_of_which_nothing_is_finite_under_random_weights_is_refused():
    with pytest.raises(UnsupportedModel, match="not finite under any of 3 sets"):
        dp_sgd(small(NeverFinite()))


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
    assert sorted(step.kernels) == sorted(layer.path for layer in trained if layer not in still)
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
            assert dp_sgd(model).method == "layers"


FALLS_BACK = {
    "tied to another layer": lambda: small(*(lambda dense: (dense, Tied(dense)))(layers.Dense(4, activation="tanh"))),
    "examples folded into positions": lambda: functional((3, 6), lambda x: head(Folded()(x))),
    "examples in another order": lambda: small(Reversed()),
}


@pytest.mark.parametrize("name", mostly_slow(FALLS_BACK, ["tied to another layer"]))
def test_a_weight_used_past_its_layer_makes_the_model_fall_back(name):
    model = perturbed(FALLS_BACK[name]())
    step = dp_sgd(model)
    assert step.method == "model"
    x, y = batch(model, 6)
    assert relative_error(step.clipped_sum(x, y, 0.8).sums, brute_force(model, x, y, 0.8)) < 3e-4


def test_one_variable_in_two_layers_makes_the_model_fall_back():
    first = layers.Dense(6, use_bias=False)
    first.build((None, 6))
    model = small(first, layers.Activation("tanh"), Borrowed(first))
    step = dp_sgd(model)
    assert step.method == "model"
    x, y = batch(model, 6)
    assert relative_error(step.clipped_sum(x, y, 0.8).sums, brute_force(model, x, y, 0.8)) < 3e-4


def test_custom_layers_with_weights_are_vectorised_alone():
    model = perturbed(small(layers.Dense(4), Scaled()))
    step = dp_sgd(model)
    x, y = batch(model, 6)
    assert relative_error(step.clipped_sum(x, y, 0.8).sums, brute_force(model, x, y, 0.8)) < 3e-4
    assert step.method == "layers" and sorted(step.kernels.values()) == ["dense", "dense", "vectorised"]


def test_a_model_with_weights_of_its_own_is_taken_as_a_whole():
    model = ByHand()
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 4), np.float32), rng.integers(0, 3, 6)
    model(x)
    step = dp_sgd(model, probe=(x[:3], y[:3]))
    assert step.method == "model"
    assert relative_error(step.clipped_sum(x, y, 0.8).sums, brute_force(model, x, y, 0.8)) < 3e-4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mix", [layers.MixUp, layers.CutMix])
def test_layers_that_mix_examples_are_refused_whatever_they_would_draw(mix, seed):
    inputs = keras.Input((4, 4, 1))
    model = keras.Model(inputs, head(layers.Flatten()(mix(seed=seed)(inputs))))
    with pytest.raises(UnsupportedModel, match="mixes the examples of a batch"):
        dp_sgd(model)


@pytest.mark.slow
def test_a_layer_whose_draws_are_not_known_is_given_one_example_at_a_time():
    """It could mix examples for other numbers than those of the trial."""
    for layer, method in (
        (MixedNowAndThen(1), "model"),
        (MyDropout(0.5), "model"),
        (layers.Dropout(0.5), "layers"),
        (layers.GaussianNoise(0.5), "layers"),
    ):
        assert dp_sgd(small(layers.Dense(4), layer)).method == method


def test_a_mask_that_a_call_shares_cannot_let_an_example_move_the_sum_by_pushing_others_into_the_next_call():
    """Opposite gradients at the end of each call of 16 cancelled, and one example in front undid that: 7.9·S."""
    for layer, alone in (
        (layers.Dropout(0.5, noise_shape=(1, 4)), True),
        (layers.AlphaDropout(0.5, noise_shape=[1, None]), True),
        (layers.Dropout(0.5, noise_shape=(None, 1)), False),
        (layers.AlphaDropout(0.5, noise_shape=[None, 1]), False),
        (layers.SpatialDropout1D(0.5), False),
    ):
        assert draws_otherwise(keras.Sequential([layer])) == alone, layer.name


@pytest.mark.slow
def test_nor_can_one_that_dropout_makes_of_something_else_than_examples():
    """Also where it has as many rows as a trial has examples."""
    for layer, by_layer in (
        (DropsAConstant(1), False),
        (DropsAConstant(3), False),
        (DropsAConstant(4), False),
        (layers.Dropout(0.5), True),
    ):
        model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(3, activation="softmax")])
        assert checked(model, LOSS, made_up(model)).by_layer == by_layer, layer.name
        assert "call" not in vars(layer), "it is as it was"


@pytest.mark.slow
def test_no_draw_of_such_a_layer_lets_an_example_move_the_sum_by_more_than_the_bound():
    model = small(MixedNowAndThen(1), layers.Dense(4))
    step = dp_sgd(model, batch_size=16)
    x, y = batch(model, 16)
    x[-1] = -1e6
    seeds = [variable for variable in model.non_trainable_variables if is_seed(variable)]
    for state in range(40):
        sums = []
        for rows in (slice(None), slice(0, 15)):
            for variable in seeds:
                variable.assign([state, 0])
            sums.append(step.clipped_sum(x[rows], y[rows], 1.0).sums)
        assert norm([a - b for a, b in zip(*sums, strict=True)]) <= 1.0


@pytest.mark.slow
def test_dropout_differs_between_examples_and_between_steps():
    for build in (small, lambda *inner: small(*inner, Scaled())):
        model = build(layers.Dense(50, activation="tanh"), layers.Dropout(0.5))
        step = dp_sgd(model)
        x, y = (np.repeat(array, 2, axis=0) for array in batch(model, 1))
        one = [step.clipped_sum(x[:1], y[:1], 100.0).sums for _ in range(2)]
        both = step.clipped_sum(x, y, 100.0).sums
        assert relative_error(one[0], one[1]) > 0.05
        assert relative_error([total / 2 for total in both], one[1]) > 0.05


def test_checking_leaves_the_model_alone():
    model = small(layers.Dense(4), layers.Dropout(0.5))
    before = [np.array(variable) for variable in model.variables]
    dp_sgd(model, noise=GaussianNoise(1))
    assert len(before) > len(model.weights), "what dropout draws from among them"
    assert all(np.array_equal(a, b) for a, b in zip(before, model.variables, strict=True))
    assert all("call" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize(
    "options, key",
    [
        ({"batch_size": 0}, "batch_size"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"clipping_norm": float("nan")}, "clipping_norm"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"loss": keras.losses.mean_squared_error}, "probe"),
        ({"loss": lambda y, p: tf.reduce_mean(LOSS(y, p)), "probe": batch(small(), 3)}, "one number per example"),
    ],
)
def test_errors_name_the_key(options, key):
    with pytest.raises(ConfigError, match=key):
        dp_sgd(small(), **options)


@pytest.mark.slow
def test_random_weights_show_a_wrong_gradient_that_those_of_the_model_hide():
    """The gradient of a layer that is shown examples in another order is nothing beside that of the other branch."""

    def inner(x):
        far, other = layers.Dense(16, name="far")(x), Reversed()(x)
        return layers.Dense(5, activation="softmax", name="top")(layers.Concatenate()([far, other]))

    model = functional((6,), inner)
    far, top = model.get_layer("far"), model.get_layer("top")
    far.bias.assign(far.bias + 1e7)
    top.kernel.assign(tf.zeros_like(top.kernel.value))
    assert trials.ModelTrials(model, LOSS, made_up(model)).first.agrees_by_layer(Gradients(model, LOSS, by_layer=True))
    assert dp_sgd(model).method == "model"


@pytest.mark.slow
def test_no_random_weights_let_no_gradient_past_a_normalisation():
    """With a scale of 0 nothing of a wrong gradient is left in front of it, and two such trials of four are enough."""
    model = small(Reversed(), layers.LayerNormalization())
    assert dp_sgd(model).method == "model"
    for number in range(len(trial_weights.SCALES)):
        with trial_weights.random_weights(model, number):
            assert all(np.any(variable) for variable in model.trainable_variables)


def test_a_step_checks_what_it_is_given():
    step = dp_sgd(small())
    x, y = batch(step.model)
    with pytest.raises(ConfigError, match="one length"):
        step.step(x, y[:-1])
    with pytest.raises(ConfigError, match="clipping_norm"):
        step.step(x, y, clipping_norm=0)


def test_a_model_that_is_certain_of_a_made_up_example_is_no_reason_to_refuse_it():
    """Its gradient is 0 there, to the last bit, and nothing can be compared by dividing."""
    model = functional((6,), lambda x: keras.layers.Dense(3, activation="softmax")(x))
    model.set_weights([np.zeros((6, 3), np.float32), np.array([200, 0, -200], np.float32)])
    probe = (np.ones((3, 6), np.float32), np.array([0, 1, 2]))
    assert dp_sgd(model, probe=probe).method == "layers"


@pytest.mark.parametrize("seed", range(5))
def test_a_trial_does_not_saturate_a_layer_of_many_inputs(seed):
    """Weights that move by the same amount in every layer add up to outputs at which no gradient can be compared."""
    kernel = keras.Variable(np.zeros((100_000, 4), np.float32))
    assert 0 < np.abs(np.ones(100_000) @ np.asarray(moved(kernel, seed))).max() < 5


@pytest.mark.parametrize(
    ("passes", "agree", "tried"),
    [
        ([1, 1], True, 2),
        ([0, 1, 1, 1], True, 4),
        ([0, 0, 0, 1, 1, 1], True, 6),
        ([0, 0, 0, 0, 1], False, 5),
        ([0] * 5, False, 5),
        ([1, 0, 1, 1], True, 4),
        ([1, 0, 0, 0, 0, 1], False, 6),
    ],
)
def test_a_model_that_fails_beside_a_kink_is_tried_under_other_weights(passes, agree, tried):
    model, seen = small(), []

    def check(trial):
        seen.append(trial)
        return bool(passes[len(seen) - 1])

    x, y = batch(model, 3)
    assert trials.ModelTrials(model, LOSS, (x, y)).passes(check) == agree
    first = [trial._values[0].numpy() for trial in seen]
    assert len(seen) == tried and len({values.tobytes() for values in first}) == tried


class Narrow(layers.Layer):
    """Raises an exception where its bias is far from 0."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(4,), initializer="zeros")

    def call(self, x):
        return x + tf.debugging.check_numerics(tf.sqrt(0.5 - tf.abs(self.bias)), "none") + self.bias


def test_a_model_that_cannot_be_tried_under_other_weights_is_refused():
    with pytest.raises(UnsupportedModel, match=r"InvalidArgumentError in a trial on made-up"):
        dp_sgd(small(layers.Dense(4), Narrow()))
