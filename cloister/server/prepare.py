"""Preparation of a run before its first message: objects, initial model and calibrated noise."""

from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from cloister.config.run import RunConfig
from cloister.core.arrays import Layout, from_record, to_record
from cloister.server.build import Plan, build
from cloister.server.initial import initial_model
from cloister.server.resume import ResumedRun
from cloister.tasks.base import Model
from cloister.tasks.making import explained_model_of


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
        ConfigError: the configuration contradicts itself, or the model differs from that of `earlier`.
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
    initial = to_record(initial_model(plan, model, pretrain and progress is None))
    layout = Layout.of(from_record(initial))
    if earlier is not None and progress is not None:
        earlier.refuse_layout(layout)
        return Prepared(plan, model, to_record(progress.model), layout)
    plan = replace(plan, strategy=plan.strategy.calibrated(layout, config.num_rounds))
    return Prepared(plan, model, initial, layout)
