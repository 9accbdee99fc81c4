"""Whether a model has per-example gradients that can be vouched for, and how they are to be computed.

What is known not to have them is refused by name. Everything else is tried on made-up examples of many scales, with
the model's weights moved at random so that nothing is zero by initialisation, and with random weights in their place:
an example's gradient must not change with the other examples, and norms and sums must agree with TensorFlow's own
gradients of one example at a time.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.errors import CloisterError, ConfigError, UnsupportedModel
from cloister.core.tensors import Layer, Network, Tensor
from cloister.privacy.dpsgd import vectorised
from cloister.privacy.dpsgd.capture import leaks
from cloister.privacy.dpsgd.draws import drawing_layers, draws_otherwise, is_seed, replaced_call, seeds_of
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.row_by_row import row_by_row
from cloister.privacy.dpsgd.trial_weights import moved, random_weights
from cloister.privacy.dpsgd.vectorised import Loss

EXAMPLES = 3
"""Made-up examples: a size that other things in a model rarely have."""
FACTORS = (1.0, -0.5, 0.25)
"""What they count with in a sum: different, so that no two can be mistaken for each other."""
AGREEMENT = 1e-4
"""Relative difference allowed between two ways to compute the same gradient in single precision."""
OVERSTATED = 1e-2
"""By how much a squared norm may be overstated, relatively, to make up for its roundings."""
SCALES = (-1.0, 0.0, 1e-3, 30.0, -30.0, 1e3, 1e5, 1e10)
"""What made-up numbers are multiplied with: a layer may couple examples only where inputs are large, say."""
TWINS = (0, 2, 2)
"""The order of made-up examples that puts one of them beside the first twice, in the place of another."""
DTYPES = ("float32", "float64")
ACTIVITY = "activity_regularizer"
PENALTIES = ("kernel_regularizer", "bias_regularizer", ACTIVITY)
"""Attributes of a layer that add to the loss of the batch; those on the weights of a frozen layer add nothing."""
COUPLED = (
    "an example's gradient changes with the other examples of its batch, so it cannot be clipped alone; look for a "
    "layer or a loss that takes a mean, a maximum or a sum over the batch"
)
SETS = 3
"""Of random weights, under which coupling is looked for."""
FURTHER, ENOUGH = 4, 2
"""Other weights under which a model is tried that fails under the first, and how many it must pass under."""
NO_SQUARE = 1e-20
"""A squared norm that is none beside those of made-up examples, which are about 1."""

Probe = tuple[NDArray, NDArray]
"""Made-up examples: x and y, `EXAMPLES` each."""


def checked(model: Network, loss: Loss, probe: Probe) -> Gradients:
    """The fastest way to this model's per-example gradients that is right.

    Args:
        model: built, of one input and one output.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        probe: x and y of a few made-up examples.

    Raises:
        UnsupportedModel: it has none, with the reason and what to use in its place.
    """
    refuse_by_name(model)
    with refusing_what_cannot_be_tried():
        trials = _Trials(model, loss, probe)
        trials.refuse_coupling()
        alone = draws_otherwise(model) or trials.first.shares_draws() or not trials.agree(_Trial.is_batch_independent)
        by_layer = None if alone else _by_layer(model, loss, trials)
        if by_layer is None:
            return _as_a_whole(model, loss, trials)
        # Tried beside the other, which computes the larger microbatches.
        by_row = _by_layer(model, loss, trials, by_row=True) if row_by_row(model) else None
        return by_row or by_layer


@contextmanager
def refusing_what_cannot_be_tried() -> Iterator[None]:
    """Raises UnsupportedModel in the place of any exception that is none of ours, with its type and not its text."""
    try:
        yield
    except CloisterError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"per-example gradients of this model cannot be computed ({type(error).__name__} in a trial on made-up "
            "examples); look for a layer that does not work on one example at a time, as recurrent ones with a mask do"
        ) from error


def _by_layer(model: Network, loss: Loss, trials: "_Trials", by_row: bool = False) -> Gradients | None:
    """The gradients layer by layer if they are right; None if they are not."""
    try:
        gradients = Gradients(model, loss, by_layer=True, by_row=by_row)
        return gradients if trials.agree(lambda trial: trial.agrees_by_layer(gradients)) else None
    except UnsupportedModel:
        raise
    except Exception:  # a layer that cannot be vectorised alone, for one
        return None


def _as_a_whole(model: Network, loss: Loss, trials: "_Trials") -> Gradients:
    gradients = Gradients(model, loss, by_layer=False)
    if not trials.agree(lambda trial: trial.agrees_as_a_whole(gradients)):
        raise UnsupportedModel("vectorised gradients of this model differ from those of one example at a time")
    return gradients


def made_up(model: Network) -> Probe:
    """Examples for a classifier of one input: positive numbers, as of images, and labels among its outputs.

    Raises:
        ConfigError: the model does not say what it takes; give a probe.
    """
    if len(getattr(model, "inputs", None) or ()) != 1 or len(model.outputs) != 1 or None in model.inputs[0].shape[1:]:
        raise ConfigError("probe must be given for a model without one input and one output of known shapes")
    (spec,), (output,), rng = model.inputs, model.outputs, np.random.default_rng(0)
    shape = (EXAMPLES, *spec.shape[1:])
    y = rng.integers(0, output.shape[-1], (EXAMPLES, *output.shape[1:-1]))
    if "int" not in spec.dtype:
        # Above 0: a zero would hide the weights that it meets.
        return rng.uniform(0.05, 1.0, shape).astype(spec.dtype), y
    sizes = [layer.input_dim for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
    return rng.integers(0, min(sizes, default=2), shape).astype(spec.dtype), y


def refuse_by_name(model: Network) -> None:
    """Refuse what is known not to have private per-example gradients.

    Raises:
        UnsupportedModel: names the layer, the reason and the replacement.
    """
    for layer in model._flatten_layers():
        for reason in _reasons(layer):
            raise UnsupportedModel(f"layer {layer.name!r} ({type(layer).__name__}) {reason}")
    if not model.trainable_variables:
        raise UnsupportedModel("the model has no trainable weights")


def _reasons(layer: Layer) -> Iterator[str]:
    layers = keras.layers
    if type(layer).__name__ in ("MixUp", "CutMix"):
        yield "mixes the examples of a batch at random; leave it out"
    if isinstance(layer, layers.BatchNormalization) and layer.trainable:
        yield (
            "normalises an example with the others of its batch and keeps their statistics un-noised; "
            "use keras.layers.GroupNormalization or LayerNormalization"
        )
    if hasattr(layer, "adapt") and getattr(layer, "input_mean", None) is None:
        yield (
            "learns from data outside of the private steps; use keras.layers.Rescaling, "
            "or give keras.layers.Normalization a public mean and variance"
        )
    if getattr(layer, "stateful", False):
        yield "carries state from batch to batch; set stateful=False"
    if any(getattr(layer, name, None) for name in PENALTIES if layer.trainable or name == ACTIVITY):
        yield "adds a penalty to the loss of the batch; use weight_decay of the optimizer, or add it to the loss"
    if layer.compute_dtype != layer.variable_dtype or layer.compute_dtype not in DTYPES:
        yield f"computes in {layer.compute_dtype}, whose norms are too coarse to bound; use float32"


class _Trials:
    """Trials of a model under its own weights, moved a little, and under random ones.

    Its own may come from a server, which knows by what they are moved, and can choose them so that a fault does not
    show: a layer then couples no examples, say, or its gradient is nothing beside another layer's.
    """

    def __init__(self, model: Network, loss: Loss, probe: Probe) -> None:
        self._model, self._loss, self._probe = model, loss, probe
        self.first = self._moved(0)

    def refuse_coupling(self) -> None:
        """Raises UnsupportedModel if an example's gradient or the model's state depends on a batch.

        So it does if nothing is finite under any random weights: then nothing could be tried.
        """
        self.first.refuse_poison()
        self.first.refuse_coupling(SCALES)
        finite = False
        for number in range(SETS):
            with self._random(number) as trial:
                if number == 0:
                    trial.refuse_poison()
                finite |= trial.refuse_coupling(())
        if not finite:
            raise UnsupportedModel("losses or gradients of this model are not finite under random weights")

    def agree(self, check: Callable[["_Trial"], bool]) -> bool:
        """Whether a check passes under the model's weights, and under random ones."""
        return self._passes_mostly(lambda number: check(self._moved(number))) and self._passes_mostly(
            lambda number: self._passes_randomly(number, check)
        )

    def _passes_mostly(self, attempt: Callable[[int], bool]) -> bool:
        """Whether the first attempt succeeds, or several others do.

        In some trials a pixel of a large picture lies next to a kink of an activation. Two computations may then
        differentiate different sides of it, and both are right.
        """
        others = (attempt(number) for number in range(1, 1 + FURTHER))
        return attempt(0) or sum(itertools.islice(filter(None, others), ENOUGH)) == ENOUGH

    def _passes_randomly(self, number: int, check: Callable[["_Trial"], bool]) -> bool:
        with self._random(number) as trial:
            return check(trial)

    def _moved(self, number: int) -> "_Trial":
        """The trial under one of several random moves of the model's weights."""
        variables = self._model.trainable_variables
        first = number * len(variables)
        return self._trial([moved(variable, first + place) for place, variable in enumerate(variables)])

    @contextmanager
    def _random(self, number: int) -> Iterator["_Trial"]:
        """The trial under one of several sets of random weights."""
        with random_weights(self._model, number):
            yield self._trial([tf.convert_to_tensor(variable.value) for variable in self._model.trainable_variables])

    def _trial(self, values: Sequence[Tensor]) -> "_Trial":
        return _Trial(self._model, self._loss, self._probe, values)


class _Trial:
    """The made-up examples, and what TensorFlow itself says about them.

    Args:
        values: of the trainable variables, in the model's order.
    """

    def __init__(self, model: Network, loss: Loss, probe: Probe, values: Sequence[Tensor]) -> None:
        self._loss = loss
        self._plain = Gradients(model, loss, by_layer=False)
        self.model = model
        self.x, self.y = tf.convert_to_tensor(probe[0]), tf.convert_to_tensor(probe[1])
        if self.x.shape[0] != EXAMPLES or self.y.shape[0] != EXAMPLES:
            raise ConfigError(f"probe must be x and y of {EXAMPLES} examples, got {self.x.shape} and {self.y.shape}")
        self._variables, self._values = model.trainable_variables, list(values)

    def _scope(self) -> keras.StatelessScope:
        """Nothing that is computed within changes the model, and each time it starts with the same random state."""
        return keras.StatelessScope(list(zip(self._variables, self._values, strict=True)), collect_losses=True)

    def refuse_coupling(self, scales: Sequence[float]) -> bool:
        """Raises UnsupportedModel if an example's gradient or the model's state depends on a batch.

        Args:
            scales: what the other examples, and all of them, are multiplied with besides. Whole numbers: with 0.

        Returns:
            Whether the example's gradient is finite, so that it was compared.
        """
        usual = self._of_first(self.x, self.y)
        self._refuse_another(usual, self._of_first(*self._ordered(self.x, TWINS)))
        for scale in scales if self.x.dtype.is_floating else (0.0,):
            scaled = self.x * tf.cast(scale, self.x.dtype)
            self._refuse_another(usual, self._of_first(tf.concat([self.x[:1], scaled[1:]], axis=0), self.y))
            self._refuse_another(self._of_first(scaled, self.y), self._of_first(*self._ordered(scaled, TWINS)))
        return all(np.isfinite(gradient).all() for gradient in usual)

    def _refuse_another(self, usual: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Raises UnsupportedModel if the gradient of one example is another beside other examples."""
        if not _each_same_if_finite(usual, found):
            raise UnsupportedModel(COUPLED)

    def refuse_poison(self) -> None:
        """Raises UnsupportedModel if the loss of the first or the last example changes where the others are not finite.

        What is not finite shows through layers that make everything else small, and through those that are off. It does
        not show through all: a maximum over positions drops NaN.
        """
        if not self.x.dtype.is_floating:
            return
        usual = self._losses(self.x)
        for place, value in itertools.product((0, EXAMPLES - 1), (np.nan, np.inf)):
            poisoned = tf.fill(self.x.shape, tf.cast(value, self.x.dtype))
            # A layer that raises an exception for such numbers is one that cannot be tried so.
            with suppress(tf.errors.OpError):
                found = self._losses(tf.tensor_scatter_nd_update(poisoned, [[place]], self.x[place : place + 1]))
                if np.isfinite(usual[place]) and not np.isclose(found[place], usual[place], AGREEMENT, AGREEMENT):
                    raise UnsupportedModel(COUPLED)

    def _losses(self, x: Tensor) -> NDArray:
        with self._scope():
            return np.asarray(self._plain.losses(x, self.y))

    def _ordered(self, x: Tensor, order: Sequence[int]) -> tuple[Tensor, Tensor]:
        return tf.gather(x, order), tf.gather(self.y, order)

    def is_batch_independent(self) -> bool:
        """Whether an example's gradient is the same at each place of a batch, however many there are.

        Otherwise it is one thing only where it is taken alone. Random layers draw by place and are left out of this.
        """
        training = not seeds_of(self.model)
        alone = self._of(0, [0], training)
        return all(
            _same(alone, self._of(place, order, training))
            for place, order in ((0, [0, 1, 2]), (2, [2, 1, 0]), (0, [0, 1]), (1, [2, 0, 1, 1]))
        )

    def shares_draws(self) -> bool:
        """Whether a random layer is given something else than a row for each example: what it draws is for all.

        Two numbers of examples are tried: what is not of the examples may have as many rows as one of them.
        """
        layers = drawing_layers(self.model)
        return bool(layers) and any(self._draws_for_others(layers, order) for order in ([0, 1, 2], [0, 1, 2, 0]))

    def _draws_for_others(self, layers: Sequence[Layer], order: list[int]) -> bool:
        shapes: list[tuple[int | None, ...]] = []
        with ExitStack() as patches, self._scope():
            for layer in layers:
                patches.enter_context(replaced_call(layer, _noting(layer, shapes)))
            self._plain.losses(*self._ordered(self.x, order))
        return any(shape[:1] != (len(order),) for shape in shapes)

    def _of(self, place: int, order: list[int], training: bool) -> list[Tensor]:
        """The gradient of the example at this place of a batch of these."""
        with self._scope(), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._values)
            own = self._plain.losses(*self._ordered(self.x, order), training)[place]
        return [tf.zeros([1]) if g is None else tf.convert_to_tensor(g) for g in tape.gradient(own, self._values)]

    def _of_first(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """The gradient of the first example, beside the others."""
        with self._scope() as scope, tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._values)
            own = self._plain.losses(x, y)[0]
            self._refuse_state(scope)
        return [tf.zeros([1]) if g is None else tf.convert_to_tensor(g) for g in tape.gradient(own, self._values)]

    def _refuse_state(self, scope: keras.StatelessScope) -> None:
        if self.model.losses or scope.losses:
            raise UnsupportedModel(
                "a layer adds a loss of its own (add_loss or a regularizer), which is not an example's; "
                "add it to the loss function, or use weight_decay of the optimizer"
            )
        state = [variable for variable in self.model.non_trainable_variables if not is_seed(variable)]
        changed = [variable.path for variable in state if scope.get_current_value(variable) is not None]
        if changed:
            raise UnsupportedModel(
                f"{changed[0]} changes while training: state learnt from data without noise; use a layer without state"
            )

    def agrees_by_layer(self, gradients: Gradients) -> bool:
        """Whether layers one by one give what TensorFlow gives; both see the same batch and the same dropout."""
        with self._scope():
            leaking = leaks(gradients.layers, lambda: self._plain.losses(self.x, self.y), self._values)
        if leaking:
            return False
        # One forward pass for all of them: in another one dropout would be another.
        with self._scope(), tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(self._values)
            losses = self._plain.losses(self.x, self.y)
            own = [losses[i] for i in range(EXAMPLES)]
            weighted = tf.reduce_sum(losses * tf.constant(FACTORS, losses.dtype))
        squares = [_squares(_filled(tape.gradient(one, self._values), self._values)) for one in own]
        total = _filled(tape.gradient(weighted, self._values), self._values)
        return self._agrees(gradients, squares, total)

    def agrees_as_a_whole(self, gradients: Gradients) -> bool:
        """Whether vectorisation gives what one example at a time gives, with the same random numbers."""
        seeds = seeds_of(self.model)
        squares, total = [], [tf.zeros_like(value) for value in self._values]
        with self._scope():
            split = [tf.random.split(tf.cast(seed.value, tf.int64), EXAMPLES + 1) for seed in seeds]
            for i, weight in enumerate(FACTORS):
                own_seeds = [several[i] for several in split]
                own = vectorised.gradients_of_one(self.model, self._loss, self.x[i], self.y[i], own_seeds, tf.ones([]))
                squares.append(_squares(own))
                total = [old + weight * new for old, new in zip(total, own, strict=True)]
        return self._agrees(gradients, squares, total)

    def _agrees(self, gradients: Gradients, squares: list[float], total: list[Tensor]) -> bool:
        with self._scope():
            got_squares, got_total = gradients.weighted(self.x, self.y, tf.constant(FACTORS, tf.float64))
        got, exact = np.asarray(got_squares, np.float64), np.array(squares, np.float64)
        # An example that is classified with certainty has no gradient: its square is 0, and nothing to divide by.
        norms_agree = (got >= exact * (1 - AGREEMENT)) & (got <= exact * (1 + OVERSTATED) + NO_SQUARE)
        return bool(np.all(norms_agree)) and _same(total, got_total)


def _noting(layer: Layer, shapes: list[tuple[int | None, ...]]) -> Callable[..., Tensor]:
    """The layer's call, which notes the shapes of what the layer is given."""
    original = layer.call

    def call(inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
        shapes.append(tuple(inputs.shape))
        return original(inputs, *args, **kwargs)

    return call


def _filled(gradients: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(gradients, values, strict=True)
    return [tf.zeros_like(value) if g is None else tf.convert_to_tensor(g) for g, value in pairs]


def _squares(gradients: Sequence[Tensor]) -> float:
    """In double precision, where squares of single precision do not underflow."""
    return float(sum(np.sum(np.square(np.asarray(gradient), dtype=np.float64)) for gradient in gradients))


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether two gradients are the same, to rounding; not where something is not finite."""
    with np.errstate(invalid="ignore"):
        apart = _squares([np.asarray(a, np.float64) - np.asarray(b) for a, b in zip(left, right, strict=True)])
    return bool(apart <= AGREEMENT**2 * _squares(left))


def _each_same_if_finite(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether two gradients are the same variable by variable, or at least one cannot be compared."""
    comparable = all(np.isfinite(gradient).all() for gradient in (*left, *right))
    return not comparable or all(_same([one], [other]) for one, other in zip(left, right, strict=True))
