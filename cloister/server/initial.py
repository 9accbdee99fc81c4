"""The model that a run starts from."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError, DataError
from cloister.core.hypotheses import stacked
from cloister.server.build import Plan
from cloister.tasks.base import Examples, Model
from cloister.tasks.training.augmentation import Augmentation
from cloister.tasks.training.plan import TrainingPlan
from cloister.tasks.training.trainers import TRAINERS
from cloister.tasks.validation import with_validation

APART = 0.01
"""Standard deviation by which hypotheses are moved apart where a model has but one way to begin."""


def initial_model(plan: Plan, model: Model, pretrain: bool = True) -> dict[str, NDArray]:
    """New weights, or several models under hypotheses; the same for the same seed.

    With `strategy.pretrain-epochs` each is trained on the server's own examples first. Hypotheses that begin alike
    (`privacy.clusters-split-round`) are copies of one model.

    Args:
        plan: of the run.
        model: of its task; left with the weights of the last hypothesis.
        pretrain: whether to do as `strategy.pretrain-epochs` says; a plan needs the names and shapes alone.

    Raises:
        DataError: the server has no examples to train on.
        ConfigError: training on them diverged.
    """
    models, copies = [], plan.hypotheses if plan.config.privacy.split_round else 1
    for number in range(max(1, plan.hypotheses) // copies):
        model.initialise(plan.seed + number)
        models.append(model.arrays())
    models = _apart(models, plan.seed)
    if pretrain and plan.config.strategy.pretrain_epochs:
        models = _pretrained(plan, model, models)
    return stacked(models * copies) if plan.hypotheses else models[0]


def _pretrained(plan: Plan, model: Model, models: list[dict[str, NDArray]]) -> list[dict[str, NDArray]]:
    """The models, each trained on the server's examples as a client without privacy would train it.

    That is by the task's recipe and what `client.*` says, for as many epochs as `strategy.pretrain-epochs` says, at a
    constant rate: a schedule is of rounds, and this is before them.
    """
    examples, epochs = _own_examples(plan), plan.config.strategy.pretrain_epochs
    recipe = replace(plan.recipe, local_epochs=epochs)
    trainer, augmentation = TRAINERS.load(model.kind)(model, recipe), Augmentation.of(plan.task, recipe)
    trained = []
    for number, arrays in enumerate(models):
        model.assign(arrays)
        trainer.fit(examples, TrainingPlan.of(recipe, (plan.seed + number, 0, 0), round=0, augmentation=augmentation))
        trained.append(model.arrays())
        _refuse_diverged(trained[-1], epochs, recipe.learning_rate)
    return trained


def _own_examples(plan: Plan) -> Examples:
    try:
        found = with_validation(plan.task, plan.task.load()).validation
    except DataError as error:
        asked = plan.config.strategy.pretrain_epochs
        raise DataError(f"strategy.pretrain-epochs = {asked} needs examples on the server: {error}") from None
    assert found is not None
    return found


def _refuse_diverged(arrays: Mapping[str, NDArray], epochs: int, rate: float) -> None:
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ConfigError(
            f"strategy.pretrain-epochs = {epochs} at client.learning-rate = {rate:g} makes weights infinite or NaN; "
            "use a smaller rate"
        )


def _apart(models: list[dict[str, NDArray]], seed: int) -> list[dict[str, NDArray]]:
    """The models, none like the first: of equal hypotheses every client would take the same, for good."""
    rng = np.random.default_rng(seed)
    for model in models[1:]:
        if all(np.array_equal(array, models[0][name]) for name, array in model.items()):
            model.update(
                {name: array + rng.normal(0, APART, array.shape).astype(array.dtype) for name, array in model.items()}
            )
    return models
