"""Preparation of a run before its first message: objects, initial model and calibrated noise."""

from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from cloister.config.run import RunConfig
from cloister.server.build import Plan, build
from cloister.server.checkpoint import ResumedRun
from cloister.tasks.base import Model
from cloister.tasks.faults import refuse_unlike_builds
from cloister.tasks.making import explained_model_of
from cloister.tasks.recipe import Augmentation
from cloister.tasks.splits import with_validation
from cloister.training.plan import TrainingPlan
from cloister.training.trainers import TRAINERS
from cloister.utils.arrays import Layout, from_record, stacked, to_record
from cloister.utils.errors import ConfigError, DataError

APART = 0.01
"""Standard deviation of the perturbation that separates hypotheses with identical initial weights."""


@dataclass(frozen=True)
class Prepared:
    """Run that is ready to begin.

    Attributes:
        plan: the objects of the run, with calibrated noise.
        model: of the task.
        initial: the model to start from, or several of them under hypotheses.
        layout: of everything that the server sends.
    """

    plan: Plan
    model: Model
    initial: ArrayRecord
    layout: Layout


def prepare(
    config: RunConfig, pretrain: bool = True, earlier: ResumedRun | None = None, draws_are_seen: bool = False
) -> Prepared:
    """Prepare the run of a configuration. Nothing is sent, charged or written.

    Args:
        config: of the run.
        pretrain: as in `initial_model`.
        earlier: the run to resume. Its model is the initial one, and its saved state replaces the calibration.
        draws_are_seen: whether nodes may learn which nodes were drawn. Sampling then gives no amplification.

    Raises:
        ConfigError: the configuration contradicts itself, or the model differs from that of `earlier`, or has frozen
            weights that differ from build to build.
        PluginError: a name is unknown.
        LedgerError: the ledger of this data is damaged.
        BudgetExhausted: the noise is to be calibrated to a budget that is spent.
    """
    plan = build(config)
    plan.strategy.draws_are_seen = draws_are_seen or (earlier is not None and earlier.draws_are_seen)
    if earlier is not None:
        plan = replace(plan, seed=earlier.seed, resumes=earlier.resumes)
    progress = None if earlier is None else earlier.progress
    model = explained_model_of(plan.task)
    refuse_unlike_builds(plan.task, model)  # before a seed is set, by which two builds would come out alike
    initial = to_record(initial_model(plan, model, pretrain and progress is None))
    layout = Layout.of(from_record(initial))
    if earlier is not None and progress is not None:
        earlier.refuse_layout(layout)
        return Prepared(plan, model, to_record(progress.model), layout)
    plan = replace(plan, strategy=plan.strategy.calibrated(layout, config.num_rounds))
    return Prepared(plan, model, initial, layout)


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
    epochs = plan.config.strategy.pretrain_epochs
    if pretrain and epochs:
        try:
            examples = with_validation(plan.task, plan.task.load()).validation
        except DataError as error:
            raise DataError(f"strategy.pretrain-epochs = {epochs} needs examples on the server: {error}") from None
        assert examples is not None
        # The learning rate is constant, since a schedule refers to rounds.
        recipe = replace(plan.recipe, local_epochs=epochs)
        trainer, augmentation = TRAINERS.load(model.kind)(model, recipe), Augmentation.of(plan.task, recipe)
        for number, arrays in enumerate(models):
            seeds = plan.seed + number, 0, 0
            model.assign(arrays)
            trainer.fit(examples, TrainingPlan.of(recipe, seeds, round=0, augmentation=augmentation))
            models[number] = model.arrays()
            if not all(np.isfinite(array).all() for array in models[number].values()):
                raise ConfigError(
                    f"strategy.pretrain-epochs = {epochs} at client.learning-rate = {recipe.learning_rate:g} makes "
                    "weights infinite or NaN; use a smaller rate"
                )
    return stacked(models * copies) if plan.hypotheses else models[0]
