"""What is decided of a run before anything is sent: its objects, the model to start from, and the noise in force."""

from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from cloister.config.run import RunConfig
from cloister.core.arrays import Layout, from_record, to_record
from cloister.server.build import Plan, build
from cloister.server.initial import initial_model
from cloister.tasks.base import Model
from cloister.tasks.making import model_of


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


def prepare(config: RunConfig, pretrain: bool = True) -> Prepared:
    """The run of a configuration, as it stands before its first message. Nothing is sent, spent or written.

    Args:
        config: of the run.
        pretrain: as in `initial_model`.

    Raises:
        ConfigError: the configuration asks for what cannot be.
        PluginError: a name is unknown.
        LedgerError: the ledger of this data is broken.
        BudgetExhausted: the noise is to fit a budget that is spent.
    """
    plan = build(config)
    model = model_of(plan.task)
    initial = to_record(initial_model(plan, model, pretrain))
    layout = Layout.of(from_record(initial))
    plan = replace(plan, strategy=plan.strategy.calibrated(layout, config.num_rounds))
    return Prepared(plan, model, initial, layout)
