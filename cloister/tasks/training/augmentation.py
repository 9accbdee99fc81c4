"""Random changes of examples while they are trained on, each example by itself.

Under DP-SGD one person's row may move only its own gradient. So a transform sees one example, and the random numbers of
an example follow from its own content, the step and the client's key: they are the same whoever else is in the data.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.tasks.base import Recipe, Task, Transform

REACH = 0.125
"""Share of a picture's height and width that `shift` moves it by at most."""


@dataclass(frozen=True)
class Augmentation:
    """Transforms that every example passes, one after the other.

    Args:
        transforms: at least one.
    """

    transforms: tuple[Transform, ...]

    @classmethod
    def of(cls, task: Task, recipe: Recipe) -> "Augmentation | None":
        """What a recipe names; None where it names nothing.

        Args:
            task: that knows the transforms.
            recipe: whose names are all known to the task.
        """
        known = transforms_of(task)
        return cls(tuple(known[name] for name in recipe.augmentation)) if recipe.augmentation else None

    def changed(self, x: NDArray, key: bytes) -> NDArray:
        """The examples, each changed at random.

        Args:
            x: inputs of shape (n, ...).
            key: of this step; another key gives other changes.

        Returns:
            New inputs, of the same shape and dtype. Row i depends on x[i] and the key alone.

        Raises:
            DataError: a transform gives inputs of another shape.
        """
        return self._each(x, key, self._one)

    def changed_or_lost(self, x: NDArray, key: bytes) -> NDArray:
        """As `changed`; an example whose transform fails becomes NaN, and changes nothing for the others.

        A private step counts such an example as nothing, as it does every gradient that is not finite.

        Args:
            x: inputs of shape (n, ...).
            key: of this step.

        Returns:
            New inputs in single precision.
        """
        return self._each(np.asarray(x, np.float32), key, self._one_or_nan)

    def _each(self, x: NDArray, key: bytes, one: Transform) -> NDArray:
        changed = np.empty_like(x)
        for place, example in enumerate(x):
            digest = hashlib.blake2b(np.ascontiguousarray(example).tobytes(), key=key, digest_size=16).digest()
            changed[place] = one(example.copy(), np.random.default_rng(int.from_bytes(digest)))
        return changed

    def _one(self, example: NDArray, rng: np.random.Generator) -> NDArray:
        shape = example.shape
        for transform in self.transforms:
            example = transform(example, rng)
            if np.shape(example) != shape:
                raise DataError(f"client.augmentation: a transform gives shape {np.shape(example)}, expected {shape}")
        return example

    def _one_or_nan(self, example: NDArray, rng: np.random.Generator) -> NDArray:
        try:
            return np.asarray(self._one(example, rng), example.dtype)
        except Exception:  # whatever it is, it must not tell the others' sum that it happened
            return np.full_like(example, np.nan)


def key_of(*parts: object) -> bytes:
    """A key that is another one for other parts, such as a secret and the number of a step; 32 bytes."""
    return hashlib.sha256(repr(parts).encode()).digest()


def transforms_of(task: Task) -> dict[str, Transform]:
    """The transforms that a task knows, by name: those of pictures if its examples are pictures, and its own."""
    shape = _picture_shape(task)
    pictures: Mapping[str, Transform] = PICTURES if shape else {}
    return {name: _on_pictures(transform, shape) for name, transform in pictures.items()} | dict(task.transforms)


def _picture_shape(task: Task) -> tuple[int, ...]:
    """Height, width and maybe channels of an example; empty where it is no picture."""
    if len(task.input_shape) in (2, 3):
        return task.input_shape
    is_flat_picture = task.image_shape and prod(task.image_shape) == prod(task.input_shape)
    return task.image_shape or () if is_flat_picture else ()


def _on_pictures(transform: Transform, shape: tuple[int, ...]) -> Transform:
    """The transform, for inputs that may be a picture in one row."""
    return lambda example, rng: transform(example.reshape(shape), rng).reshape(example.shape)


def mirrored(picture: NDArray, rng: np.random.Generator) -> NDArray:
    """The picture with left and right exchanged, or as it is, with equal probability.

    Args:
        picture: shape (height, width, ...).
        rng: decides.
    """
    return picture[:, ::-1] if rng.random() < 0.5 else picture


def shifted(picture: NDArray, rng: np.random.Generator) -> NDArray:
    """The picture moved by up to `REACH` of its height and width, with zeros where nothing is left of it.

    Args:
        picture: shape (height, width, ...).
        rng: decides how far.
    """
    down, right = (int(rng.integers(-reach, reach + 1)) for reach in map(_reach, picture.shape[:2]))
    moved = np.zeros_like(picture)
    (to_y, from_y), (to_x, from_x) = _spans(down), _spans(right)
    moved[to_y, to_x] = picture[from_y, from_x]
    return moved


def _reach(size: int) -> int:
    return max(1, round(REACH * size))


def _spans(by: int) -> tuple[slice, slice]:
    """Where a row lands that is moved by so many places, and where it comes from."""
    if by >= 0:
        return slice(by, None), slice(None, -by or None)
    return slice(None, by), slice(-by, None)


PICTURES: Mapping[str, Transform] = {"flip": mirrored, "shift": shifted}
"""Transforms of pictures by the names that `client.augmentation` takes."""
