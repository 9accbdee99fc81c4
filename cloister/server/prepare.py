"""What is decided of a run before anything is sent: its objects, the model to start from, and the noise in force."""

import math
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from cloister.config.run import RunConfig, parse
from cloister.config.secure import SWITCHED_OFF
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.errors import BudgetExhausted, CloisterError
from cloister.server.build import Plan, build
from cloister.server.initial import initial_model
from cloister.server.resume import Earlier
from cloister.tasks.base import Model
from cloister.tasks.making import explained_model_of

NOISE = "privacy.noise-multiplier"


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


def prepare(config: RunConfig, pretrain: bool = True, earlier: Earlier | None = None) -> Prepared:
    """The run of a configuration, as it stands before its first message. Nothing is sent, spent or written.

    Args:
        config: of the run.
        pretrain: as in `initial_model`.
        earlier: the part of it that there was, where it is resumed: its model is the one to start from, and its noise
            is restored with its state, not calibrated anew.

    Raises:
        ConfigError: the configuration asks for what cannot be, or the model is another one than that of `earlier`.
        PluginError: a name is unknown.
        LedgerError: the ledger of this data is broken.
        BudgetExhausted: the noise is to fit a budget that is spent.
    """
    plan = build(config)
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


def refuse_impossible_budget(prepared: Prepared) -> None:
    """Refuse a budget of the server of which nothing is spent, and which not one round fits.

    One that earlier runs have spent ends a run before its first round, with what is claimed over all of them.

    Raises:
        BudgetExhausted: it names the noise that all rounds would fit with, where more noise helps.
    """
    plan = prepared.plan
    budget, rounds = plan.budget, plan.config.num_rounds
    if not budget.max_epsilon or budget.ledger.has_released(budget.unit):
        return
    each = sum(map(budget.cost, plan.strategy.events(prepared.layout)))
    if each <= budget.limit:
        return
    raise BudgetExhausted(
        f"not one round fits privacy.max-epsilon = {budget.max_epsilon:g} at privacy.target-delta = {budget.delta:g}: "
        f"one takes {100 * each / budget.limit:.4g} % of it; use a larger budget{_more_noise(prepared)} for "
        f"{rounds} rounds"
    )


def _more_noise(prepared: Prepared) -> str:
    """With how much noise all rounds would fit; empty where the mechanism cannot be calibrated."""
    plan = prepared.plan
    try:
        config = parse({**plan.config.flat(), NOISE: "auto", **SWITCHED_OFF})
        claim = build(config).strategy.calibrated(prepared.layout, config.num_rounds).claim()
        least = float(claim.parameters[NOISE])
    except (CloisterError, KeyError):
        return ""
    unit = 10.0 ** (math.floor(math.log10(least)) - 3)
    return f", or {NOISE} of {math.ceil(least / unit) * unit:.4g} or more"
