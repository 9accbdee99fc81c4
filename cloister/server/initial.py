"""Initial model of a run."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError, DataError
from cloister.core.hypotheses import stacked
from cloister.server.build import Plan
from cloister.tasks.base import Model
from cloister.tasks.training.augmentation import Augmentation
from cloister.tasks.training.plan import TrainingPlan
from cloister.tasks.training.trainers import TRAINERS
from cloister.tasks.validation import with_validation

APART = 0.01
"""Standard deviation of the perturbation that separates hypotheses with identical initial weights."""


def initial_model(plan: Plan, model: Model, pretrain: bool = True) -> dict[str, NDArray]:
    """Return the initial weights of all models, determined by the seed.

    With `strategy.pretrain-epochs` the server first trains each on its own examples. With
    `privacy.clusters-split-round` all hypotheses are copies of one model.

    Args:
        plan: of the run.
        model: of its task; it keeps the weights of the last hypothesis.
        pretrain: whether to apply `strategy.pretrain-epochs`; a plan needs only names and shapes.

    Raises:
        DataError: the server has no examples to train on.
        ConfigError: the training diverged.
    """
    models, copies = [], plan.hypotheses if plan.config.privacy.split_round else 1
    for number in range(max(1, plan.hypotheses) // copies):
        model.initialise(plan.seed + number)
        models.append(model.arrays())
    rng = np.random.default_rng(plan.seed)
    for arrays in models[1:]:  # models equal to the first are perturbed, so that clients' choices differ
        if all(np.array_equal(array, models[0][name]) for name, array in arrays.items()):
            arrays |= {
                name: array + rng.normal(0, APART, array.shape).astype(array.dtype) for name, array in arrays.items()
            }
    if pretrain and plan.config.strategy.pretrain_epochs:
        models = _pretrained(plan, model, models)
    return stacked(models * copies) if plan.hypotheses else models[0]


def _pretrained(plan: Plan, model: Model, models: list[dict[str, NDArray]]) -> list[dict[str, NDArray]]:
    """Train each model on the server's examples, without privacy.

    Training uses the task's recipe and the options of `client.*` for `strategy.pretrain-epochs` epochs. The learning
    rate is constant, since a schedule refers to rounds.
    """
    epochs = plan.config.strategy.pretrain_epochs
    try:
        examples = with_validation(plan.task, plan.task.load()).validation
    except DataError as error:
        raise DataError(f"strategy.pretrain-epochs = {epochs} needs examples on the server: {error}") from None
    assert examples is not None
    recipe = replace(plan.recipe, local_epochs=epochs)
    trainer, augmentation = TRAINERS.load(model.kind)(model, recipe), Augmentation.of(plan.task, recipe)
    trained = []
    for number, arrays in enumerate(models):
        model.assign(arrays)
        trainer.fit(examples, TrainingPlan.of(recipe, (plan.seed + number, 0, 0), round=0, augmentation=augmentation))
        trained.append(model.arrays())
        if not all(np.isfinite(array).all() for array in trained[-1].values()):
            raise ConfigError(
                f"strategy.pretrain-epochs = {epochs} at client.learning-rate = {recipe.learning_rate:g} makes weights "
                "infinite or NaN; use a smaller rate"
            )
    return trained
