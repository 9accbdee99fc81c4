"""Weights under which a model is tried: its own, a little off, or random ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from cloister.core.model_state import sent_weights
from cloister.core.tensors import Network, Tensor, Variable
from cloister.privacy.dpsgd.draws import seeds_of

MOVED = 0.05
"""Standard deviation at most by which weights are moved."""


class Scale(NamedTuple):
    """How large random weights are.

    Attributes:
        outputs: standard deviation of what a kernel gives for inputs of size 1.
        biases: of everything with one axis, such as a bias or the scale of a normalisation: above 0, as nothing would
            get past a scale of 0, nor a gradient.
    """

    outputs: float
    biases: float


SCALES = (Scale(1.0, 1.0), Scale(1.5, 0.1), Scale(3.0, 0.01), Scale(1.0, 0.3), Scale(2.0, 0.03))
"""Of each set of random weights. With large biases outputs hardly depend on the example, so other sets have smaller
ones."""


def moved(variable: Variable, seed: int) -> Tensor:
    """The variable's value, a little off at random: nothing is zero by initialisation any more.

    A kernel of many inputs moves by less, so that its outputs stay about as large as they were. The gradient of a
    saturated output is a difference of two nearly equal numbers, and no two ways to compute it agree.

    Args:
        variable: of a model.
        seed: of the random numbers.
    """
    return variable.value + tf.cast(min(MOVED, _scale(variable)) * _noise(variable, seed), variable.dtype)


def random_value(variable: Variable, seed: int, number: int) -> Tensor:
    """A random value. It does not depend on the variable's own, which a malicious server may have chosen.

    Args:
        variable: of a model.
        seed: of the random numbers.
        number: of the set of random weights, which says how large they are.
    """
    scale = SCALES[number]
    deviation = scale.outputs * _scale(variable) if len(variable.shape) > 1 else scale.biases
    return tf.cast(deviation * _noise(variable, seed), variable.dtype)


def _scale(variable: Variable) -> float:
    """1/√(number of inputs of a kernel); of an embedding: of its rows."""
    return float(np.prod(variable.shape[:-1])) ** -0.5


def _noise(variable: Variable, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(variable.shape, np.float32)


@contextmanager
def random_weights(model: Network, number: int) -> Iterator[None]:
    """Replace the weights that a server sends by a set of random ones while the block runs.

    Args:
        model: whose they are.
        number: of the set.
    """
    with other_weights(model, partial(random_value, number=number), number):
        yield


@contextmanager
def other_weights(model: Network, values: Callable[[Variable, int], Tensor], number: int = 0) -> Iterator[None]:
    """Replace the weights that a server sends while the block runs. They and the random state are restored afterwards.

    Args:
        model: whose they are.
        values: the new ones, of a variable and a seed.
        number: selects the seeds.
    """
    variables = [weight for weight in sent_weights(model) if tf.as_dtype(weight.dtype).is_floating]
    before = [(variable, np.array(variable)) for variable in (*variables, *seeds_of(model))]
    try:
        for place, variable in enumerate(variables):
            variable.assign(values(variable, number * len(variables) + place))
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
