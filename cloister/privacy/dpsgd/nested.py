"""Examples of a model with several inputs or outputs: arrays in tuples, lists and dicts, for any framework."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cloister.utils.errors import ConfigError

Examples: TypeAlias = NDArray | Sequence["Examples"] | Mapping[str, "Examples"]
"""Examples in the rows of an array, or of each array of a tuple, list or dict, in the structure of the model."""
MADE_UP = 3
"""Number of dummy examples in a probe."""
Probe = tuple[Examples, Examples]
"""x and y of `MADE_UP` dummy examples. Only their shapes and types are used."""


def mapped(change: Callable[..., Any], like: Any, *others: Any) -> Any:
    """Return a structure of the results of a function, called with the arrays at one place of each structure.

    Args:
        change: of an array, and an array of each other structure.
        like: gives the structure of the result.
        others: of the same structure; a list may stand in the place of a tuple.

    Raises:
        ValueError: a structure is another one.
    """
    if isinstance(like, Mapping):
        if any(not isinstance(other, Mapping) or other.keys() != like.keys() for other in others):
            raise ValueError("not the same names")
        return {name: mapped(change, own, *(other[name] for other in others)) for name, own in like.items()}
    if isinstance(like, (list, tuple)):
        if any(not isinstance(other, (list, tuple)) or len(other) != len(like) for other in others):
            raise ValueError("not the same number of arrays")
        parts = [mapped(change, *same) for same in zip(like, *others, strict=True)]
        return parts if isinstance(like, list) else tuple(parts)
    if any(isinstance(other, (Mapping, list, tuple)) for other in others):
        raise ValueError("several arrays in the place of one")
    return change(like, *others)


def arrays_in(examples: Any) -> list[Any]:
    """Return the arrays of a structure in order."""
    found: list[Any] = []
    mapped(found.append, examples)
    return found


def check_probe(probe: Probe) -> None:
    """Raise ConfigError unless each array of x and y has `MADE_UP` examples."""
    if {len(array) for array in arrays_in(probe)} != {MADE_UP}:
        shapes = " and ".join(str(array.shape) for array in arrays_in(probe))
        raise ConfigError(f"probe must be x and y of {MADE_UP} examples, got {shapes}")


def as_probed(x: Examples, y: Examples, probe: Probe) -> tuple[Examples, Examples, int]:
    """Return examples as NumPy arrays in the probe's structure, and their number.

    Raises:
        ConfigError: arrays are of different lengths, or not of the probe's structure and shapes.
    """
    made, lengths = [], set()
    for name, given, like in zip("xy", (x, y), probe, strict=True):
        try:
            arrays = mapped(lambda _, array: np.asarray(array), like, given)
        except ValueError:
            raise ConfigError(f"{name} must be arrays in the structure of the probe's {name}") from None
        for array, expected in zip(arrays_in(arrays), arrays_in(like), strict=True):
            if array.ndim == 0 or array.shape[1:] != expected.shape[1:]:
                shape = ", ".join(map(str, ("n", *expected.shape[1:])))
                raise ConfigError(f"{name} must have shape ({shape}), got {array.shape}")
        lengths |= set(map(len, arrays_in(arrays)))
        made.append(arrays)
    if len(lengths) != 1:
        raise ConfigError(f"x and y must have one length, got {sorted(lengths)}")
    return made[0], made[1], lengths.pop()


def take(examples: Examples, rows: NDArray[np.intp] | slice) -> Examples:
    """Return some of the examples."""
    return mapped(lambda array: array[rows], examples)
