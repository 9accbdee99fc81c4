"""Model of a run, its trainer, the training plan of a round, and the choice of a hypothesis."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cloister.client.data import task_of
from cloister.client.request import NamedArrays, TrainRequest
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import ClientConfig, RunConfig, TaskConfig
from cloister.privacy.mechanisms.selection import PrivateChoice
from cloister.tasks.base import Examples, Model, Recipe, Task
from cloister.tasks.making import frozen_digest, model_of
from cloister.tasks.recipe import Augmentation, recipe_of
from cloister.training.plan import Schedule, TrainingPlan
from cloister.training.trainers import TRAINERS, Trainer
from cloister.utils.registry import Registry

PRIVATE_TRAINERS = Registry(
    "DP-SGD trainer",
    "cloister.dp_sgd_trainers",
    {
        "keras": "cloister.client.dp_sgd_keras:PrivateKerasTrainer",
        "numpy": "cloister.client.dp_sgd:PrivateNumpyTrainer",
        "sklearn": "cloister.client.dp_sgd_sklearn:PrivateSklearnTrainer",
        "torch": "cloister.client.dp_sgd_torch:PrivateTorchTrainer",
    },
)


@runtime_checkable
class SumsGradients(Protocol):
    """Trainer that sums clipped gradients for a step that other clients take with it."""

    def summed(self, examples: Examples, plan: TrainingPlan) -> NamedArrays:
        """Return the clipped sum over one secret draw of units, without noise: not for release.

        Args:
            examples: of this client.
            plan: of this round.

        Returns:
            An array for each one that the model sends, of its shape; zeros for one that is not trained.
        """


class ModelAndTrainer:
    """Model of a run, with a trainer that is created at its first use.

    Both have the same lifetime, so that a trainer never trains a discarded model.

    Args:
        task, client, privacy: of the run configuration.
    """

    def __init__(self, task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> None:
        self._task, self._client, self._privacy = task_of(task), client, privacy
        self._group_cap = privacy.dp_sgd.group_cap if task.group else 1
        self.model: Model = model_of(self._task)

    @cached_property
    def frozen(self) -> str:
        """Return the SHA-256 of weights neither trained nor sent; empty without any."""
        return frozen_digest(self.model)

    @cached_property
    def trainer(self) -> Trainer:
        """Return the trainer of the model, with the configured optimizer.

        Raises:
            ConfigError: the task does not permit this training; or the optimizer is unknown, or incompatible with the
                model.
            UnsupportedModel: the run protects examples, and the model has no gradients of single examples.
        """
        recipe = recipe_of(self._task, self._client, self._privacy)
        if not self._privacy.client.clips_gradients:
            return TRAINERS.load(self.model.kind)(self.model, recipe)
        return PRIVATE_TRAINERS.load(self.model.kind)(self.model, recipe, self._privacy, self._group_cap)

    def prepare(self) -> None:
        """Create the trainer; raises the exceptions of `trainer`."""
        _ = self.trainer


def model_and_trainer_of(config: RunConfig) -> ModelAndTrainer:
    """Return the workbench of a run, cached for later messages."""
    return _made(config.task, config.client, config.privacy)


@lru_cache(maxsize=1)
def _made(task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> ModelAndTrainer:
    return ModelAndTrainer(task, client, privacy)


def run_recipe(config: RunConfig) -> Recipe:
    """Return the training recipe of a run, cached for later messages.

    Raises:
        ConfigError: as `recipe_of`.
    """
    return _resolved(config.task, config.client, config.privacy)


@lru_cache(maxsize=1)
def _resolved(task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> Recipe:
    return recipe_of(task_of(task), client, privacy)


def requested_plan(request: TrainRequest, owner: int, public_size: int = 0) -> TrainingPlan:
    """Return the plan of a message, with the recipe as default of `client.*`.

    Where a round is a step that all clients take together, batch and epochs are those of this client in it.

    Args:
        request: of the server.
        owner: number of the client, so that clients shuffle independently.
        public_size: of the node's data; 0: it is not known, or not needed.

    Raises:
        ConfigError: the task cannot be trained with these settings.
    """
    config = request.config
    recipe = run_recipe(config)
    plan = TrainingPlan.of(
        recipe,
        (request.seed, request.round, owner),
        proximal_mu=request.proximal_mu,
        round=request.round,
        public_size=public_size,
        schedule=Schedule.of(recipe, config.num_rounds),
        augmentation=Augmentation.of(task_of(config.task), recipe),
    )
    if not public_size or not config.privacy.client.clips_gradients:
        return plan
    steps = config.privacy.dp_sgd.steps(public_size, plan.batch_size, plan.epochs)
    return replace(plan, batch_size=steps.batch_size, epochs=steps.epochs)


def chosen_to_train(
    privacy: PrivacyConfig, model: Model, models: Sequence[NamedArrays], task: Task, examples: Examples
) -> int:
    """Return the hypothesis of least loss, by a private choice if configured.

    Args:
        privacy: of the run.
        model: its weights are replaced to compute losses.
        models: k hypotheses.
        task: computes the losses.
        examples: of the client; possibly none.
    """
    if len(models) == 1:
        return 0
    if not privacy.chooses_privately:
        return best(model, models, task, examples)
    choice = choice_of(privacy, examples.groups is not None)
    losses_by = _losses if choice.unit == "client" else _losses_alone
    losses = [losses_by(model, hypothesis, task, examples) for hypothesis in models]
    # Numbers in place of names, which may be of any type.
    groups = None if examples.groups is None else np.unique(examples.groups, return_inverse=True)[1]
    return choice.choose(losses, groups)


def choice_of(privacy: PrivacyConfig, grouped: bool) -> PrivateChoice:
    """Return the mechanism of a private choice.

    It protects the units of DP-SGD, or the client as a whole.
    """
    unit: Literal["client", "example", "group"] = "client"
    if privacy.client.clips_gradients:
        unit = "group" if grouped else "example"
    return PrivateChoice(privacy.choice_epsilon, privacy.max_loss, unit)


def best(model: Model, models: Sequence[NamedArrays], task: Task, examples: Examples) -> int:
    """Assign the hypothesis of least mean loss to the model and return it.

    This answer carries no noise.
    """
    chosen = 0
    if len(models) > 1:
        chosen = int(np.argmin([_mean(_losses(model, hypothesis, task, examples)) for hypothesis in models]))
    model.assign(models[chosen])
    return chosen


def _losses(model: Model, hypothesis: NamedArrays, task: Task, examples: Examples) -> NDArray:
    """Return the loss of each example, shape (n,)."""
    if not len(examples):
        return np.zeros(0)
    model.assign(hypothesis)
    return task.losses(examples.y, model.predict(examples.x))


def _losses_alone(model: Model, hypothesis: NamedArrays, task: Task, examples: Examples) -> NDArray:
    """Return each loss, shape (n,), bit for bit independent of other rows.

    Processors sum in an order that depends on the number of rows. For some weights only one order overflows, so that
    one more row would change every loss. If a loss cannot be computed, it is ∞ for that row alone.
    """
    model.assign(hypothesis)
    return np.concatenate([np.zeros(0), *_contained_losses(model, task, examples)])


def _contained_losses(model: Model, task: Task, examples: Examples) -> Iterator[NDArray]:
    """Yield losses in order; after an exception, compute each half separately."""
    count = len(examples)
    if not count:
        return
    try:
        scores = model.predict_alone(examples.x)
        yield np.concatenate([task.losses(examples.y[i : i + 1], scores[i : i + 1]) for i in range(count)])
    except Exception:  # no exception may affect the losses of other examples
        if count == 1:
            yield np.full(1, np.inf)
            return
        for half in np.array_split(np.arange(count), 2):
            yield from _contained_losses(model, task, examples.take(half))


def _mean(losses: NDArray) -> float:
    """Return the mean loss; ∞ for a hypothesis that has diverged."""
    mean = float(np.mean(losses)) if len(losses) else 0.0
    return mean if math.isfinite(mean) else math.inf
