"""Examples in the structure of a model, their losses, and the seeds of its random layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.errors import ConfigError
from cloister.core.model_state import is_seed
from cloister.core.tensors import Network, Tensor, Variable

Examples: TypeAlias = NDArray | Sequence["Examples"] | Mapping[str, "Examples"]
"""Examples in the rows of an array, or of each array of a tuple, list or dict, in the structure of the model."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Losses of shape (rows,) from labels and the model's outputs, each of its own example alone."""
MADE_UP = 3
"""Number of dummy examples in a probe."""
Probe = tuple[Examples, Examples]
"""x and y of `MADE_UP` dummy examples. Only their shapes and types are used."""


def losses_of(model: Network, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """Return the losses of examples in training mode, shape (rows,).

    Args:
        model: built.
        loss: of each example separately.
        x, y: examples and labels, a row each.

    Raises:
        ConfigError: the loss function returns another type or shape.
    """
    losses = loss(y, model(x, training=True))
    rows = tuple(tf.nest.flatten(x)[0].shape[:1])
    if not isinstance(losses, tf.Tensor) or tuple(losses.shape) != rows:
        got = losses.shape if isinstance(losses, tf.Tensor) else type(losses).__name__
        raise ConfigError(f"loss must give one number per example, shape {rows}; got {got}")
    return losses


def made_up(model: Network) -> Probe:
    """Return dummy examples for a classifier: zeros.

    Raises:
        ConfigError: the shapes of the model's inputs and outputs are unknown; a probe is required.
    """
    inputs, outputs = (list(getattr(model, name, None) or ()) for name in ("inputs", "outputs"))
    if not inputs or len(outputs) != 1 or any(None in end.shape[1:] for end in inputs + outputs):
        raise ConfigError(
            "probe must be given: the model does not name its inputs, or has several outputs, or axes of unknown length"
        )
    given = inputs[0] if len(inputs) == 1 else model.input
    x = tf.nest.map_structure(lambda spec: np.zeros((MADE_UP, *spec.shape[1:]), spec.dtype), given)
    return x, np.zeros((MADE_UP, *outputs[0].shape[1:-1]), np.int64)


def check_probe(probe: Probe) -> None:
    """Raise ConfigError unless each array of x and y has `MADE_UP` examples."""
    if {len(array) for array in tf.nest.flatten(probe)} != {MADE_UP}:
        shapes = " and ".join(str(array.shape) for array in tf.nest.flatten(probe))
        raise ConfigError(f"probe must be x and y of {MADE_UP} examples, got {shapes}")


def as_probed(x: Examples, y: Examples, probe: Probe) -> tuple[Examples, Examples, int]:
    """Return examples as NumPy arrays in the probe's structure, and their number.

    Raises:
        ConfigError: arrays are of different lengths, or not of the probe's structure and shapes.
    """
    made, lengths = [], set()
    for name, given, like in zip("xy", (x, y), probe, strict=True):
        try:
            tf.nest.assert_same_structure(given, like, check_types=False)
        except (TypeError, ValueError):
            raise ConfigError(f"{name} must be arrays in the structure of the probe's {name}") from None
        arrays = list(map(np.asarray, tf.nest.flatten(given)))
        for array, expected in zip(arrays, tf.nest.flatten(like), strict=True):
            if array.ndim == 0 or array.shape[1:] != expected.shape[1:]:
                shape = ", ".join(map(str, ("n", *expected.shape[1:])))
                raise ConfigError(f"{name} must have shape ({shape}), got {array.shape}")
        lengths |= set(map(len, arrays))
        made.append(tf.nest.pack_sequence_as(like, arrays))
    if len(lengths) != 1:
        raise ConfigError(f"x and y must have one length, got {sorted(lengths)}")
    return made[0], made[1], lengths.pop()


def take(examples: Examples, rows: NDArray[np.intp]) -> Examples:
    """Return some of the examples."""
    return tf.nest.map_structure(lambda array: array[rows], examples)


def specs_of(rows: Sequence[int], examples: Examples) -> Examples:
    """Return a spec of shape (*rows, ...) and of the dtype of each array."""
    return tf.nest.map_structure(lambda array: tf.TensorSpec([*rows, *array.shape[1:]], array.dtype), examples)


def seeds_of(model: Network) -> list[Variable]:
    """Return all states of a model's random number generators; may be empty."""
    return [variable for variable in model.non_trainable_variables if is_seed(variable)]


def seeded(model: Network, seeds: Tensor) -> list[tuple[Variable, Tensor]]:
    """Return values for a `keras.StatelessScope` that set random layers' seeds.

    Args:
        model: network with random layers.
        seeds: shape (random layers, 2), integers.
    """
    return [(state, tf.cast(seeds[number], state.dtype)) for number, state in enumerate(seeds_of(model))]
