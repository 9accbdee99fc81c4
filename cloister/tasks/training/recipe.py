"""Training recipe of a run, resolved from the task and the run configuration, and validated."""

import math
from collections.abc import Iterator
from typing import get_args

from cloister.config.privacy import PrivacyConfig
from cloister.config.run import ClientConfig
from cloister.core.errors import ConfigError
from cloister.tasks.base import Recipe, ScheduleName, Task
from cloister.tasks.training.augmentation import transforms_of


def recipe_of(task: Task, client: ClientConfig, privacy: PrivacyConfig) -> Recipe:
    """Return the training recipe of a run.

    Args:
        task: of the run.
        client, privacy: of the run configuration.

    Raises:
        ConfigError: the task, or the clients' mechanism, does not support the recipe.
    """
    recipe = task.recipe.resolved(client)
    if complaint := next(misfits(task, recipe), ""):
        raise ConfigError(complaint)
    if recipe.callbacks is not None and privacy.client.is_on:
        raise ConfigError(
            f"privacy.client = {privacy.client.name!r} refuses the Keras callbacks of this task: they see losses and "
            "weights without noise; use client.callbacks = false"
        )
    return recipe


def misfits(task: Task, recipe: Recipe) -> Iterator[str]:
    """Yield the settings of a recipe that this task does not support.

    Args:
        task: to be trained.
        recipe: of the run.
    """
    # A task's own recipe bypasses the checks of the run configuration.
    if recipe.schedule not in get_args(ScheduleName):
        yield f"client.schedule = {recipe.schedule!r} is none of {', '.join(get_args(ScheduleName))}"
    if not 0 <= recipe.final_rate_share <= 1:
        yield f"client.final-rate-share = {recipe.final_rate_share} must be from 0 to 1"
    if recipe.warmup_rounds < 0:
        yield f"client.warmup-rounds = {recipe.warmup_rounds} must be at least 0"
    if not all(0 < weight < math.inf for weight in (recipe.loss_scale, *recipe.class_weights)):
        yield "client.class-weights and client.loss-scale must be finite numbers above 0"
    weights, name = recipe.class_weights, task.config.name
    if weights and len(weights) != task.classes:
        needed = f"one for each of its {task.classes} classes" if task.classes else "none, as it has no classes"
        yield f"client.class-weights has {len(weights)} numbers, and task {name!r} takes {needed}"
    if len(set(recipe.augmentation)) < len(recipe.augmentation):
        # Repeated transforms would let a server prolong each example, and infer their number from the time.
        yield "client.augmentation names a transform more than once"
    known = transforms_of(task)
    for transform in recipe.augmentation:
        if transform not in known:
            listed = ", ".join(known) or "none"
            yield f"client.augmentation = {transform!r} is no transform of task {name!r}, which has {listed}"
