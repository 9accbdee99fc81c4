"""What is decided of a run before anything is sent: its objects, the model to start from, and the noise in force."""

from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from cloister.config.run import RunConfig
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.hypotheses import stacked
from cloister.server.build import Plan, build
from cloister.tasks.base import Model

APART = 0.01
"""Standard deviation by which hypotheses are moved apart where a model has but one way to begin."""


@dataclass(frozen=True)
class Prepared:
    """A run that could begin.

    Attributes:
        plan: everything that it is made of; its noise is calibrated.
        model: of the task.
        initial: the model to start from, or several of them under hypotheses.
        layout: of everything that the server sends.
    """

    plan: Plan
    model: Model
    initial: ArrayRecord
    layout: Layout


def prepare(config: RunConfig) -> Prepared:
    """The run of a configuration, as it stands before its first message. Nothing is sent, spent or written.

    Raises:
        ConfigError: the configuration asks for what cannot be.
        PluginError: a name is unknown.
        LedgerError: the ledger of this data is broken.
        BudgetExhausted: the noise is to fit a budget that is spent.
    """
    plan = build(config)
    model = plan.task.build()
    initial = to_record(_initial(plan, model))
    layout = Layout.of(from_record(initial))
    plan = replace(plan, strategy=plan.strategy.calibrated(layout, config.num_rounds))
    return Prepared(plan, model, initial, layout)


def _initial(plan: Plan, model: Model) -> dict[str, NDArray]:
    """The model to start from, or several of them under hypotheses."""
    models = []
    for number in range(max(1, plan.hypotheses)):
        model.initialise(plan.seed + number)
        models.append(model.arrays())
    return stacked(_apart(models, plan.seed)) if plan.hypotheses else models[0]


def _apart(models: list[dict[str, NDArray]], seed: int) -> list[dict[str, NDArray]]:
    """The models, none like the first: of equal hypotheses every client would take the same, for good."""
    rng = np.random.default_rng(seed)
    for model in models[1:]:
        if all(np.array_equal(array, models[0][name]) for name, array in model.items()):
            model.update(
                {name: array + rng.normal(0, APART, array.shape).astype(array.dtype) for name, array in model.items()}
            )
    return models
