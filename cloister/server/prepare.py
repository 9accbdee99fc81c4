"""What is decided of a run before anything is sent: its objects, the model to start from, and the noise in force."""

from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from cloister.config.run import RunConfig
from cloister.core.arrays import Layout, from_record, to_record
from cloister.server.build import Plan, build
from cloister.server.initial import initial_model
from cloister.server.resume import Earlier
from cloister.tasks.base import Model
from cloister.tasks.making import explained_model_of


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


def prepare(
    config: RunConfig, pretrain: bool = True, earlier: Earlier | None = None, draws_are_seen: bool = False
) -> Prepared:
    """The run of a configuration, as it stands before its first message. Nothing is sent, spent or written.

    Args:
        config: of the run.
        pretrain: as in `initial_model`.
        earlier: the part of it that there was, where it is resumed: its model is the one to start from, and its noise
            is restored with its state, not calibrated anew.
        draws_are_seen: whether nodes may learn who was drawn. Draws then amplify nothing.

    Raises:
        ConfigError: the configuration asks for what cannot be, or the model is another one than that of `earlier`.
        PluginError: a name is unknown.
        LedgerError: the ledger of this data is broken.
        BudgetExhausted: the noise is to fit a budget that is spent.
    """
    plan = build(config)
    plan.strategy.draws_are_seen = draws_are_seen
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
