"""Training steps, plain and of DP-SGD, of the task's model on random examples."""

from dataclasses import replace

import numpy as np

from cloister.bench.clock import Action
from cloister.client.workbench import Workbench
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import RunConfig, parse
from cloister.tasks.base import Examples, Recipe, Task
from cloister.tasks.training.augmentation import Augmentation
from cloister.tasks.training.plan import TrainingPlan
from cloister.tasks.training.recipe import recipe_of

STEPS = 8
"""Steps in a turn, which share the trainer's work once per round."""


def plain_steps(config: RunConfig, task: Task) -> Action:
    """Return an action of training steps without privacy.

    Args:
        config: of the run.
        task: of the run.
    """
    return _steps(config, task, parse({"privacy.server": "none"}).privacy)


def private_steps(config: RunConfig, task: Task) -> Action:
    """Return an action of DP-SGD steps.

    If the run's clients use DP-SGD, it has their settings, otherwise the defaults.

    Args:
        config: of the run.
        task: of the run.

    Raises:
        ConfigError: the task cannot be trained by DP-SGD.
        UnsupportedModel: the model has no per-example gradients.
    """
    default = parse({"privacy.server": "none", "privacy.client": "dp-sgd"}).privacy
    return _steps(config, task, config.privacy if config.privacy.client.clips_gradients else default)


def _steps(config: RunConfig, task: Task, privacy: PrivacyConfig) -> Action:
    """Return one epoch of a client with `STEPS` batches.

    It has no callbacks, as DP-SGD.
    """
    client = config.client.model_copy(update={"callbacks": False})
    recipe = replace(recipe_of(task, client, privacy), local_epochs=1)
    trainer = Workbench(config.task, client, privacy).trainer
    examples = random_examples(config, task, recipe)
    plan = TrainingPlan.of(recipe, (0, 1, 0), augmentation=Augmentation.of(task, recipe))
    return lambda: lambda: trainer.fit(examples, plan)


def random_examples(config: RunConfig, task: Task, recipe: Recipe) -> Examples:
    """Draw inputs from 0 to 1 and targets at random, each example a unit of its own.

    Args:
        config: of the run.
        task: defines the shapes.
        recipe: with the batch size.
    """
    rng, count = np.random.default_rng(0), STEPS * recipe.batch_size
    x = rng.random((count, *task.input_shape), np.float32)
    y = rng.integers(0, task.classes, count) if task.classes else rng.random(count, np.float32)
    return Examples(x, y, np.arange(count) if config.task.group else None)
