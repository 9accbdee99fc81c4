"""Trials of a model: per-example gradients of made-up examples must agree with TensorFlow's own.

Examples are tried at several scales. The model's weights are moved at random so that nothing is zero by initialisation,
and replaced by random ones.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import keras
import numpy as np
import tensorflow as tf

from cloister.core.errors import UnsupportedModel
from cloister.core.model_state import is_seed
from cloister.core.tensors import Layer, Network, Tensor
from cloister.privacy.dpsgd import vectorised
from cloister.privacy.dpsgd.capture import leaks
from cloister.privacy.dpsgd.draws import drawing_layers, replaced_call, seeds_of
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.layer_trials import refuse_coupled_layers
from cloister.privacy.dpsgd.probe import EXAMPLES, Probe
from cloister.privacy.dpsgd.real_shapes import keeps_rows
from cloister.privacy.dpsgd.refusals import LEARNT
from cloister.privacy.dpsgd.trial_weights import SCALES, moved, random_weights
from cloister.privacy.dpsgd.vectorised import Loss

FACTORS = (1.0, -0.5, 0.25)
"""What made-up examples count with in a sum: different, so that no two can be mistaken for each other."""
AGREEMENT = 1e-4
"""Relative difference allowed between two ways to compute the same gradient in single precision."""
OVERSTATED = 1e-2
"""By how much a squared norm may be overstated, relatively, to make up for its roundings."""
FACTORS_OF_OTHERS = (-1.0, 0.0, 30.0, 1e3, 1e10)
"""What other examples are multiplied by: a layer may couple examples only where inputs are large, say."""
TWINS = (0, 2, 2)
"""The order of made-up examples that puts one of them beside the first twice, in the place of another."""
COUPLING_SETS = 3
"""Of random weights, under which coupling is looked for."""
RETRIES = len(SCALES) - 1
"""Other weights under which a model is tried that fails under the first ones."""
RETRIES_TO_PASS = 2
"""How many of them it must pass under."""
NO_SQUARE = 1e-20
"""A squared norm that is none beside those of made-up examples, which are about 1."""
COUPLED = (
    "an example's gradient changes with the other examples of its batch, and DP-SGD needs one that does not; look for "
    "a layer or a loss that takes a mean, a maximum or a sum over the batch"
)
NEVER_FINITE = (
    f"the gradient of a made-up example is not finite under any of {COUPLING_SETS} sets of random weights, so that "
    "nothing could be compared; use layers that are finite for weights of either sign"
)


class ModelTrials:
    """Trials of a model under its own weights, moved a little, and under random ones.

    The model's own weights may come from a malicious server. The move is known to it, so it can choose weights under
    which a faulty layer has no effect, or a gradient much smaller than another layer's. Random weights do not depend on
    its choice.

    Args:
        model: built, with one input and one output.
        loss: of each example by itself.
        probe: made-up examples.

    Attributes:
        first: the trial under the model's own weights.
    """

    def __init__(self, model: Network, loss: Loss, probe: Probe) -> None:
        self._model, self._loss, self._probe = model, loss, probe
        self.first = self._moved(0)

    def refuse_coupled_layers(self) -> None:
        """Raises UnsupportedModel if what a layer or the loss gives for one example depends on the others."""
        with self._random(0) as trial:
            trial.refuse_coupled_layers()

    def refuse_coupling(self) -> None:
        """Raises UnsupportedModel if an example's gradient or the model's state depends on other examples.

        Also if no gradient is finite under any random weights: then nothing could be compared.
        """
        self.first.refuse_coupling(FACTORS_OF_OTHERS)
        finite = [self._refuse_random_coupling(number) for number in range(COUPLING_SETS)]
        if not any(finite):
            raise UnsupportedModel(NEVER_FINITE)

    def _refuse_random_coupling(self, number: int) -> bool:
        """Whether gradients are finite under a set of random weights. If they show coupling, raises an exception."""
        with self._random(number) as trial:
            return trial.refuse_coupling(())

    def passes(self, check: Callable[["Trial"], bool]) -> bool:
        """Whether a check passes under the model's weights, and under random ones.

        Args:
            check: of one trial.
        """
        return self._passes_with_retries(lambda number: check(self._moved(number))) and self._passes_with_retries(
            lambda number: self._passes_randomly(number, check)
        )

    def _passes_with_retries(self, attempt: Callable[[int], bool]) -> bool:
        """Whether the first attempt succeeds, or several others do.

        In some trials a pixel of a large picture lies next to a kink of an activation. Two computations may then
        differentiate different sides of it, and both are right.
        """
        others = (attempt(number) for number in range(1, 1 + RETRIES))
        return attempt(0) or sum(itertools.islice(filter(None, others), RETRIES_TO_PASS)) == RETRIES_TO_PASS

    def _passes_randomly(self, number: int, check: Callable[["Trial"], bool]) -> bool:
        with self._random(number) as trial:
            return check(trial)

    def _moved(self, number: int) -> "Trial":
        """The trial under one of several random moves of the model's weights."""
        variables = self._model.trainable_variables
        first = number * len(variables)
        return self._trial([moved(variable, first + place) for place, variable in enumerate(variables)])

    @contextmanager
    def _random(self, number: int) -> Iterator["Trial"]:
        """The trial under one of several sets of random weights."""
        with random_weights(self._model, number):
            yield self._trial([tf.convert_to_tensor(variable.value) for variable in self._model.trainable_variables])

    def _trial(self, values: Sequence[Tensor]) -> "Trial":
        return Trial(self._model, self._loss, self._probe, values)


class Trial:
    """The made-up examples, and what TensorFlow itself says about them.

    Args:
        model, loss, probe: as in `ModelTrials`.
        values: of the trainable variables, in the model's order.

    Attributes:
        model: as given.
        x, y: the probe, as tensors.
    """

    def __init__(self, model: Network, loss: Loss, probe: Probe, values: Sequence[Tensor]) -> None:
        self._loss = loss
        self._plain = Gradients(model, loss, by_layer=False)
        self.model = model
        self.x, self.y = tf.convert_to_tensor(probe[0]), tf.convert_to_tensor(probe[1])
        self._variables, self._values = model.trainable_variables, list(values)

    def _scope(self) -> keras.StatelessScope:
        """Nothing that is computed within changes the model, and each time it starts with the same random state."""
        return keras.StatelessScope(list(zip(self._variables, self._values, strict=True)), collect_losses=True)

    def refuse_coupling(self, factors: Sequence[float]) -> bool:
        """Raises UnsupportedModel if an example's gradient or the model's state depends on other examples.

        Args:
            factors: what the other examples are multiplied by, and after that all of them. Whole numbers are
                multiplied by 0 alone.

        Returns:
            Whether the example's gradient is finite, so that it was compared.
        """
        usual = self._gradient(0, self.x, self.y)
        self._refuse_state()
        self._refuse_another(usual, self._gradient(0, *self._ordered(self.x, TWINS)))
        for factor in factors if self.x.dtype.is_floating else (0.0,):
            scaled = self.x * tf.cast(factor, self.x.dtype)
            self._refuse_another(usual, self._gradient(0, tf.concat([self.x[:1], scaled[1:]], axis=0), self.y))
            self._refuse_another(self._gradient(0, scaled, self.y), self._gradient(0, *self._ordered(scaled, TWINS)))
        return all(np.isfinite(gradient).all() for gradient in usual)

    def _refuse_another(self, usual: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        if not _each_same_if_finite(usual, found):
            raise UnsupportedModel(COUPLED)

    def refuse_coupled_layers(self) -> None:
        """Raises UnsupportedModel if what a layer or the loss gives for one example depends on the others."""

        def forward(order: Sequence[int], loss: Loss) -> Tensor:
            with self._scope():
                return Gradients(self.model, loss, by_layer=False).losses(*self._ordered(self.x, order))

        refuse_coupled_layers(self.model, self._loss, forward, self._scope)

    def keeps_rows(self) -> bool:
        """Whether all that the layers of a known model are given, and give, has a row for each example alone."""

        def forward(order: Sequence[int]) -> Tensor:
            with self._scope():
                return self._plain.losses(*self._ordered(self.x, order))

        return keeps_rows(self.model, forward)

    def _ordered(self, x: Tensor, order: Sequence[int]) -> tuple[Tensor, Tensor]:
        return tf.gather(x, order), tf.gather(self.y, order)

    def is_batch_independent(self) -> bool:
        """Whether an example's gradient is the same at each place of a batch, however many there are.

        Otherwise it is one thing only where it is taken alone. Random layers draw by place and are left out of this.
        """
        training = not seeds_of(self.model)
        alone = self._gradient(0, *self._ordered(self.x, [0]), training)
        return all(
            _same(alone, self._gradient(place, *self._ordered(self.x, order), training))
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

    def _gradient(self, place: int, x: Tensor, y: Tensor, training: bool = True) -> list[Tensor]:
        """The gradient of the example at this place, beside the others."""
        with self._scope(), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._values)
            own = self._plain.losses(x, y, training)[place]
        return _filled(tape.gradient(own, self._values), self._values)

    def _refuse_state(self) -> None:
        """Raises UnsupportedModel if the model changes its state in training, or adds to the loss by itself."""
        with self._scope() as scope:
            self._plain.losses(self.x, self.y)
            if self.model.losses or scope.losses:
                raise UnsupportedModel(
                    "a layer adds a loss of its own (add_loss or a regularizer), which is not an example's; "
                    "add it to the loss function, or use weight_decay of the optimizer"
                )
        state = [variable for variable in self.model.non_trainable_variables if not is_seed(variable)]
        changed = [variable.path for variable in state if scope.get_current_value(variable) is not None]
        if changed:
            raise UnsupportedModel(f"{changed[0]} changes {LEARNT}")

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
