"""Training recipe of a run, resolved from task and configuration, and random augmentation of examples.

Under DP-SGD one person's row may change only its own gradient. So a transform receives one example. Its random
numbers follow from the example's content, the step and the client's key: other examples do not change them.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from cloister.config.privacy import PrivacyConfig
from cloister.config.run import ClientConfig
from cloister.tasks.base import Recipe, ScheduleName, Task, Transform
from cloister.utils.errors import ConfigError, DataError

REACH = 0.125
"""Largest displacement of `shift`, as a share of a picture's height and width."""


@dataclass(frozen=True)
class Augmentation:
    """Sequence of transforms that every example passes.

    Args:
        transforms: at least one.
    """

    transforms: tuple[Transform, ...]

    @classmethod
    def of(cls, task: Task, recipe: Recipe) -> "Augmentation | None":
        """Return the augmentation that a recipe names, or None if it names no transform.

        Args:
            task: with the transforms.
            recipe: whose names are all transforms of the task.
        """
        if not recipe.augmentation:
            return None
        known = transforms_of(task)
        return cls(tuple(known[name] for name in recipe.augmentation))

    def changed(self, x: NDArray, key: bytes) -> NDArray:
        """Return the examples, each changed at random.

        Args:
            x: inputs of shape (n, ...).
            key: of this step; another key gives other changes.

        Returns:
            New inputs, of the same shape and dtype. Row i depends on x[i] and the key alone.

        Raises:
            DataError: a transform returns inputs of another shape.
        """
        return self._each(x, key, self._one)

    def changed_or_lost(self, x: NDArray, key: bytes) -> NDArray:
        """Return the examples as `changed` does, with NaN where a transform fails.

        A failure changes no other example. A private step replaces the non-finite gradient of such an example by zero.

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
        except Exception:  # no failure may change the sum over the other examples
            return np.full_like(example, np.nan)


def key_of(*parts: object) -> bytes:
    """Hash parts, such as a secret and a step number, to a key of 32 bytes."""
    return hashlib.sha256(repr(parts).encode()).digest()


def transforms_of(task: Task) -> dict[str, Transform]:
    """Return the transforms of a task by name.

    These are its own, and those of pictures if its examples are pictures. There are none for several inputs, nor for
    pictures with targets of places (a mask), which would have to be changed alike.
    """
    if set(task.input_shapes) != {""}:
        return {}
    own = task.input_shapes[""]
    shape = own if len(own) in (2, 3) else task.image_shape or ()
    if prod(shape) != prod(own) or any(len(target.shape) > 1 for target in task.targets.values()):
        shape = ()  # not a picture, which may be flattened
    pictures: Mapping[str, Transform] = PICTURES if shape else {}
    first = task.channels_first and len(shape) == 3
    return {name: _on_pictures(each, shape, first) for name, each in pictures.items()} | dict(task.transforms)


def _on_pictures(transform: Transform, shape: tuple[int, ...], channels_first: bool) -> Transform:
    """Return the transform for inputs that may be flattened pictures."""

    def changed(example: NDArray, rng: np.random.Generator) -> NDArray:
        picture = example.reshape(shape)
        if channels_first:
            return np.moveaxis(transform(np.moveaxis(picture, 0, -1), rng), -1, 0)
        return transform(picture, rng).reshape(example.shape)

    return changed


def mirrored(picture: NDArray, rng: np.random.Generator) -> NDArray:
    """Exchange left and right of the picture with probability ½.

    Args:
        picture: shape (height, width, ...).
        rng: of the draw.
    """
    return picture[:, ::-1] if rng.random() < 0.5 else picture


def shifted(picture: NDArray, rng: np.random.Generator) -> NDArray:
    """Move the picture by up to `REACH` of its height and width, and fill with zeros.

    Args:
        picture: shape (height, width, ...).
        rng: of the displacement.
    """
    limits = (max(1, round(REACH * size)) for size in picture.shape[:2])
    down, right = (int(rng.integers(-reach, reach + 1)) for reach in limits)
    moved = np.zeros_like(picture)
    (to_y, from_y), (to_x, from_x) = _spans(down), _spans(right)
    moved[to_y, to_x] = picture[from_y, from_x]
    return moved


def _spans(by: int) -> tuple[slice, slice]:
    """Return the target and the source slice of a displacement."""
    if by >= 0:
        return slice(by, None), slice(None, -by or None)
    return slice(None, by), slice(-by, None)


PICTURES: Mapping[str, Transform] = {"flip": mirrored, "shift": shifted}
"""Transforms of pictures by the names that `client.augmentation` takes."""


def recipe_of(task: Task, client: ClientConfig, privacy: PrivacyConfig) -> Recipe:
    """Return the training recipe of a run.

    Args:
        task: of the run.
        client, privacy: of the run configuration.

    Raises:
        ConfigError: the task, or the clients' mechanism, does not support the recipe.
    """
    recipe = task.recipe.resolved(client)
    if complaint := next(recipe_faults(task, recipe), ""):
        raise ConfigError(complaint)
    if recipe.callbacks is not None and privacy.client.is_on:
        raise ConfigError(
            f"privacy.client = {privacy.client.name!r} refuses the Keras callbacks of this task: they see losses and "
            "weights without noise; use client.callbacks = false"
        )
    return recipe


def _schedule_faults(recipe: Recipe) -> Iterator[str]:
    """Yield the settings of a learning rate schedule that are out of range."""
    if callable(recipe.schedule):
        found = [recipe.schedule(passed) for passed in (0.0, 0.5, 1.0)]
        if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in found):
            yield (
                f"client.schedule is a function that returns {', '.join(map(repr, found))} where 0, 0.5 and 1 of the "
                "rounds have passed, and must return shares of the learning rate, from 0 to 1"
            )
    elif recipe.schedule not in get_args(ScheduleName):
        yield f"client.schedule = {recipe.schedule!r} is none of {', '.join(get_args(ScheduleName))}"
    if not 0 <= recipe.final_rate_share <= 1:
        yield f"client.final-rate-share = {recipe.final_rate_share} must be from 0 to 1"
    if recipe.warmup_rounds < 0:
        yield f"client.warmup-rounds = {recipe.warmup_rounds} must be at least 0"


def recipe_faults(task: Task, recipe: Recipe) -> Iterator[str]:
    """Yield the settings of a recipe that this task does not support.

    Args:
        task: to be trained.
        recipe: of the run.
    """
    # A task's own recipe bypasses the checks of the run configuration.
    yield from _schedule_faults(recipe)
    rate = recipe.learning_rate
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        found = repr(rate) if isinstance(rate, int | float) else f"of type {type(rate).__name__}"
        yield (
            f"client.learning-rate is {found}, and must be a number above 0; client.schedule and client.warmup-rounds "
            "change it over the rounds"
        )
    if not isinstance(recipe.optimizer, str) and not callable(recipe.optimizer):
        yield (
            f"client.optimizer is of type {type(recipe.optimizer).__name__}, and must be the name of an optimizer; "
            "give its options as optimizer_options"
        )
    if not all(0 < weight < math.inf for weight in (recipe.loss_scale, *recipe.class_weights)):
        yield "client.class-weights and client.loss-scale must be finite numbers above 0"
    weights, name = recipe.class_weights, task.config.name
    if weights and len(weights) != task.classes:
        needed = f"one for each of its {task.classes} classes" if task.classes else "none, as no example has one class"
        yield f"client.class-weights has {len(weights)} numbers, and task {name!r} takes {needed}"
    if len(set(recipe.augmentation)) < len(recipe.augmentation):
        # Repeated transforms would let a server prolong each example, and infer their number from the time.
        yield "client.augmentation names a transform more than once"
    known = transforms_of(task)
    for transform in recipe.augmentation:
        if transform not in known:
            listed = ", ".join(known) or "none"
            yield f"client.augmentation = {transform!r} is no transform of task {name!r}, which has {listed}"
