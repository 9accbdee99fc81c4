"""Weights under which a model is tried: its own, a little off, or random ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import tensorflow as tf

from cloister.core.tensors import Network, Tensor, Variable, frozen_weights
from cloister.privacy.dpsgd.draws import seeds_of

MOVED = 0.05
"""Standard deviation at most by which weights are moved."""
RANDOM = ((1.0, 1.0), (1.5, 0.1), (3.0, 0.01), (10.0, 0.0), (1.0, 0.0))
"""Of each set of random weights, the standard deviations: of outputs of a kernel, and of biases. With large biases all
examples look alike to the layers behind."""


def moved(variable: Variable, seed: int) -> Tensor:
    """The variable's value, a little off at random: nothing is zero by initialisation any more.

    A kernel of many inputs moves by less, so that its outputs stay about as large as they were. The gradient of a
    saturated output is a difference of two nearly equal numbers, and no two ways to compute it agree.

    Args:
        variable: of a model.
        seed: of the random numbers.
    """
    return variable.value + tf.cast(min(MOVED, _scale(variable)) * _noise(variable, seed), variable.dtype)


def fresh(variable: Variable, seed: int, number: int = 0) -> Tensor:
    """A random value that does not depend on the variable's value, by which a server can hide what it will do later.

    Args:
        variable: of a model.
        seed: of the random numbers.
        number: of the set of random weights, which says how large they are.
    """
    kernels, biases = RANDOM[number]
    deviation = kernels * _scale(variable) if len(variable.shape) > 1 else biases
    return tf.cast(deviation * _noise(variable, seed), variable.dtype)


def _scale(variable: Variable) -> float:
    """One by the root of how many inputs a kernel has."""
    return float(np.prod(variable.shape[:-1])) ** -0.5


def _noise(variable: Variable, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(variable.shape, np.float32)


def sent(model: Network) -> list[Variable]:
    """The weights that a server sends: of the layers that are trained, those too that are not trained themselves."""
    frozen = {id(weight) for weight in frozen_weights(model)}
    return [weight for weight in model.weights if id(weight) not in frozen]


@contextmanager
def random_weights(model: Network, number: int) -> Iterator[None]:
    """Replace the weights that a server sends by a set of random ones while the block runs.

    Args:
        model: whose they are.
        number: of the set.
    """
    with other_weights(model, partial(fresh, number=number), number):
        yield


@contextmanager
def other_weights(model: Network, values: Callable[[Variable, int], Tensor], number: int = 0) -> Iterator[None]:
    """Replace the weights that a server sends while the block runs. They and the random state are restored afterwards.

    Args:
        model: whose they are.
        values: the new ones, of a variable and a seed.
        number: selects the seeds.
    """
    variables = [weight for weight in sent(model) if tf.as_dtype(weight.dtype).is_floating]
    before = [(variable, np.array(variable)) for variable in (*variables, *seeds_of(model))]
    try:
        for place, variable in enumerate(variables):
            variable.assign(values(variable, number * len(variables) + place))
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
