"""Execution of one run, from its configuration to its run directory."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from cloister.config.run import RunConfig
from cloister.privacy.claims.claim import Claim, Statement
from cloister.privacy.claims.premises import known_by, of_runtime, of_transport
from cloister.privacy.claims.server import ALL_PLANNED, statement
from cloister.privacy.claims.to_json import record, running
from cloister.privacy.dpsgd.local_steps import Holders, LocalSteps
from cloister.server.build import Plan
from cloister.server.checkpoint import (
    NODES,
    Progress,
    ResumedRun,
    StatefulGrid,
    earlier_run,
    forget_nodes,
    note_ledger,
    refuse_other_ledger,
    remember,
    stateful_objects,
)
from cloister.server.client_claims import Attested, client_claim, personalise, shared_units, sizes_known
from cloister.server.evaluation import CentralEvaluation, refuse_unknown_score
from cloister.server.ledger_location import (
    check_budget_invalidation,
    draws_are_seen,
    is_in_process,
    is_shared_ledger,
    is_simulated,
    render_budget,
    require_node_state,
    use_run_local_ledger,
    warn_of_other_names,
)
from cloister.server.polling_grid import MAXIMUM, Quorum, Transport, transport_of
from cloister.server.preflight import low_snr_warnings, refuse_impossible_budget
from cloister.server.prepare import Prepared, prepare
from cloister.server.reports.console import ConsoleReporter, JsonReporter
from cloister.server.reports.rundir import EVALUATION, PARAMETERS, REPORT, RunDirectory, refuse_name
from cloister.server.round import Observer, Round, RoundLoop, Sites
from cloister.server.stopping import EarlyStopping, Ended, Ending, Stop, StopAsked, diverged, ending_of, is_disk_full
from cloister.tasks.base import Model
from cloister.tasks.faults import refuse_faulty, sample, tried
from cloister.tasks.making import Parameters, frozen_digest_field
from cloister.utils.arrays import Layout, from_record, unstacked
from cloister.utils.crash import write_traces_to
from cloister.utils.errors import CloisterError, DataError
from cloister.utils.rows import finite_rows
from cloister.utils.wire import ROUND, SEED

if TYPE_CHECKING:
    from cloister.server.reports.loggers import MlflowTracker

logger = logging.getLogger("cloister.server")
AnyClaim = TypeVar("AnyClaim", bound=Claim)


@dataclass(frozen=True)
class Outcome:
    """Result of a run that ended without an exception.

    Attributes:
        arrays: the global model that the run keeps.
        rounds: number 0 is the initial model. Rounds before a resume have scores only.
        directory: of the run.
        plan: objects of the run.
        statement: the privacy statement.
        stopped: reason for an early end; empty: the run was not ended early.
        ended: a word of `Ending`; `no-replies` and `error` are raised instead.
        transport: separation of nodes by the transport; None: no SuperLink relayed messages.
    """

    arrays: ArrayRecord
    rounds: list[Round]
    directory: RunDirectory
    plan: Plan
    statement: Statement
    stopped: str
    ended: Ended = "as-asked"
    transport: Transport | None = None

    @property
    def privacy(self) -> dict[str, object]:
        """Return the content of `privacy.json`."""
        return record(self.statement) | Ending(self.ended, self.stopped).facts()


@dataclass(frozen=True)
class RunContext:
    """Objects that the steps of a run share.

    Attributes:
        plan: what the configuration describes.
        model: of the task.
        layout: of everything that the server sends.
        directory: of the run.
        narrator: reports to a person.
        score: scores models on the server's examples; None: no central evaluation.
        stopping: ends a run that no longer improves.
        attested: counts the mechanisms that nodes state.
        sizes: the private steps of each client in a round, where they are known.
        shared: as in `client_claim`.
        simulated: whether this machine simulates every node.
        earlier: the run that is resumed; None: a new run.
        tracker: sends the run to MLflow; None: it is off.
        rounds: the finished ones.
        sites: names of nodes.
        counted: whether a reply counted before the resume.
    """

    plan: Plan
    model: Model
    layout: Layout
    directory: RunDirectory
    narrator: ConsoleReporter
    score: CentralEvaluation | None
    stopping: EarlyStopping
    attested: Attested
    sizes: tuple[LocalSteps, ...]
    shared: frozenset[Holders] | None
    simulated: bool
    earlier: ResumedRun | None = None
    tracker: "MlflowTracker | None" = None
    rounds: list[Round] = field(default_factory=list)
    sites: Sites = field(default_factory=Sites)
    counted: bool = False

    @property
    def progress(self) -> Progress | None:
        """Return the saved state of a resumed run; None for a new run."""
        return None if self.earlier is None else self.earlier.progress


def run(grid: Grid, config: RunConfig, narrator: ConsoleReporter | None = None, clients: int = 0) -> Outcome:
    """Train on the nodes of the grid and write everything to a run directory.

    The directory is new, or that of the resumed run. However the run ends, `run` first writes the last good model, the
    claim about all releases and the reason.

    Args:
        grid: to the nodes.
        config: of the run.
        narrator: reports to a person; by default on standard output.
        clients: number of clients that this process simulates; 0: none.

    Raises:
        CloisterError: the run cannot start or continue, or no client takes part in it.
    """
    started = time.perf_counter()
    require_node_state(config, grid)
    with ExitStack() as stack:
        earlier = stack.enter_context(earlier_run(config, grid, clients)) if config.resume else None
        refuse_name(config)
        prepared = prepare(config, earlier=earlier, draws_are_seen=draws_are_seen(grid))
        check_budget_invalidation(prepared.plan, grid)
        if earlier is None:
            refuse_impossible_budget(prepared)
        context = _set_up(prepared, grid, narrator, clients, earlier, stack)
        _begin(context, grid, stack, clients)
        plan = context.plan
        with Stop().listening() as stop, _observers(context, grid) as observers:
            loop = RoundLoop(
                grid,
                plan.strategy,
                context.score,
                observers,
                {SEED: plan.seed, **frozen_digest_field(context.model)},
                config.round_timeout,
                config.evaluation.every,
                context.stopping,
                stop,
                judged_by_clients=config.evaluates_on_clients,
                quorum=Quorum.of(config),
                to_the_end=plan.is_accounted,
                told=context.narrator.note,
                sites=context.sites,
                answered=lambda: _save_memories(context, grid),
                attested=context.attested,
                counted=context.counted,
            )
            with context.narrator.live(grid, context.sites):
                failure = run_rounds(loop, prepared.initial, config.num_rounds, context.progress)
            said, ending = _save(context, loop)
            if (plan.hypotheses or config.task.statistics == "local") and failure is None:
                _send_final_models(context, loop, stop)
        seconds = time.perf_counter() - started
        _report(context, loop, ending)
        with suppress(OSError) if failure else nullcontext():  # what is full may be the disk that the console is on
            best = loop.stopping.best_round if loop.stopping.best is not None else loop.aggregated
            kept = next((done for done in context.rounds if done.number == best), None)
            context.narrator.closing(plan, context.directory, said, ending, kept, seconds)
    if failure is not None and ending.how != "disk":
        raise failure
    if ending.how == "error":
        raise CloisterError(ending.why)
    return Outcome(loop.kept, context.rounds, context.directory, plan, said, ending.why, ending.how, transport_of(grid))


def _set_up(
    prepared: Prepared,
    grid: Grid,
    narrator: ConsoleReporter | None,
    clients: int,
    earlier: ResumedRun | None,
    stack: ExitStack,
) -> RunContext:
    """Return the objects of a run, with its directory, and the restored state of a resumed one.

    A new directory is removed again if the run does not begin.
    """
    plan, model, layout, config = prepared.plan, prepared.model, prepared.layout, prepared.plan.config
    score = _central(plan, model)
    refuse_faulty(plan.task, model, score.examples if score else None)
    narrator = narrator or (JsonReporter if config.log_format == "json" else ConsoleReporter)(config.num_rounds)
    asked = config.evaluation
    refuse_unknown_score(plan.task, model, asked.criterion, None if config.evaluates_on_clients else score)
    stopping = EarlyStopping(asked.patience, config.privacy.split_round, asked.criterion)
    sizes, shared = sizes_known(plan, grid), shared_units(plan, grid)
    if earlier is None:
        # Numbers for which no ε can be computed are refused here: training would end without a claim.
        plan.maximum_epsilon(layout)
        client_claim(plan, layout, config.num_rounds + plan.resumes, sizes, shared)
        directory = stack.enter_context(RunDirectory.create(plan, grid.run.fab_hash, clients).begun())
    else:
        directory = earlier.directory
    directory.announce()  # at once: a process killed from here on is resumed; begun anew, it would find its name taken
    attested = Attested(plan.strategy.has_secret_cohorts)
    # Reserve twice the size of the model: a new archive is written before it replaces the old one.
    directory.reserve(2 * layout.size * np.dtype(layout.dtype).itemsize)
    write_traces_to(directory.path)
    use_run_local_ledger(plan, grid, directory.path)
    refuse_other_ledger(directory, plan.budget.ledger)
    rounds: list[Round] = []
    counted = False
    if earlier is not None:
        if earlier.progress is not None:
            earlier.progress.restore(stateful_objects(plan, stopping, attested))
        earlier.refuse_more_rounds(config, plan.claim.is_guaranteed or config.privacy.client.is_on)
        split = None if plan.held_out is None else plan.held_out.split
        remember(grid, earlier, split, plan.strategy.has_secret_cohorts)
        lines = directory.cut(earlier.last_round)
        rounds += map(Round.of_line, lines)
        counted = any(map(Round.line_has_counted, lines))
        after = (*earlier.resumed_after, *([] if earlier.progress is None else [earlier.progress.round]))
        directory.go_on(plan, after, grid.run.fab_hash)
    tracker = None
    if config.tracking != "none":
        from cloister.server.reports.loggers import MlflowTracker

        tracker = MlflowTracker(plan, directory)
        stack.callback(tracker.close)
    facts = (attested, sizes, shared, is_simulated(grid), earlier, tracker, rounds)
    return RunContext(plan, model, layout, directory, narrator, score, stopping, *facts, counted=counted)


def _central(plan: Plan, model: Model) -> CentralEvaluation | None:
    """Return the evaluation on the server's examples.

    It is None if the configuration switches it off, if `auto` finds no examples on the server, or if statistics stay
    at the sites.

    Raises:
        DataError: the server has no examples, and the configuration requires them, directly or for early stopping.
    """
    asked = plan.config.evaluation
    if not plan.config.scores_centrally:
        return None
    try:
        return CentralEvaluation(plan.task, model, plan.hypotheses, bool(plan.config.strategy.pretrain_epochs))
    except DataError as error:
        if asked.central is True or (asked.patience and not plan.config.evaluates_on_clients):
            raise
        logger.warning("models are not scored on the server: %s", error)
        return None


def _begin(context: RunContext, grid: Grid, stack: ExitStack, clients: int) -> None:
    """Begin the budget, and say what is about to happen."""
    plan, directory, layout, narrator = context.plan, context.directory, context.layout, context.narrator
    if plan.strategy.has_secret_cohorts:
        # The run directory must not reveal how often each client was drawn.
        stack.callback(forget_nodes, directory)
    # Render the budget first: entries from here on count as spent.
    room = [] if context.rounds else render_budget(plan, layout, directory.path)
    renamed = warn_of_other_names(plan, directory.path)
    plan.budget.begin(directory.name)
    for reason in plan.unprotected_releases:
        plan.budget.record_unprotected(reason)
    note_ledger(directory, plan.budget.ledger)
    epsilon = plan.maximum_epsilon(layout)
    narrator.majority = None if context.score is None else context.score.majority
    narrator.opening(plan, directory, as_shown(plan.claim, grid, plan.resumes > 0, ended=False), epsilon)
    remarks = low_snr_warnings(plan, layout, clients or plan.config.strategy.min_nodes, context.sizes)
    warnings = [f"warning: {remark}" for remark in remarks]
    for line in (*([f"warning: {renamed}"] if renamed else []), *room, *warnings):
        narrator.note(line)
    parameters = Parameters.of(context.model)
    directory.write_json(PARAMETERS, asdict(parameters))
    if not parameters.are_all_trained:
        narrator.note(f"model          {parameters}")
    if parameters.kept:
        narrator.note("               the released model holds no site's statistics: those of a new model, untrained")
    if context.rounds:
        narrator.resuming(context.rounds[-1], plan, epsilon)
    directory.write_json("privacy.json", running(plan.claim))


def run_rounds(
    loop: RoundLoop, initial: ArrayRecord, rounds: int, progress: Progress | None = None
) -> BaseException | None:
    """Run the rounds and return the exception that ended them, or None.

    Args:
        loop: of the run.
        initial: the model to start from.
        rounds: number of the last round.
        progress: the saved state of a resumed run; None: a new run.
    """
    MAXIMUM.follow(initial)
    try:
        loop.run(initial, rounds, None if progress is None else progress.round)
    except BaseException as error:
        if loop.ending.how == "as-asked":
            loop.ending = ending_of(error)
        return error
    return None


def _save(context: RunContext, loop: RoundLoop) -> tuple[Statement, Ending]:
    """Write the model, the canaries, the ledger's copy and `privacy.json`."""
    directory, plan, model = context.directory, context.plan, context.model
    unusable: list[str] = []

    def save_models() -> None:
        """Write the final model, or every hypothesis, and note those without finite predictions."""
        kept = from_record(loop.kept)
        several = unstacked(kept) if plan.hypotheses else []
        named = {f"hypothesis-{number}": arrays for number, arrays in enumerate(several)} or {"model": kept}
        inputs = sample(plan.task, context.score.examples if context.score else None)
        for name, arrays in named.items():
            model.assign(arrays)
            model.save(directory.path / f"{name}{model.suffix}")
            outputs, _ = tried(lambda: model.predict(inputs))
            is_finite = all(np.isfinite(array).all() for array in arrays.values())
            if not is_finite or (outputs is not None and not finite_rows(outputs).all()):
                unusable.append(f"{name}{model.suffix}")

    def save_canaries() -> None:
        if len(plan.strategy.canaries):
            directory.write_json("canaries.json", plan.strategy.canaries.facts())

    directory.make_room()
    ending = _tried("the model", save_models, loop.ending)
    if unusable and ending.how not in ("error", "disk"):
        ending = diverged(ending, unusable, {done.number: done.central for done in context.rounds})
    ending = _tried("canaries.json", save_canaries, ending)
    ending = _tried("the copy of the ledger", lambda: directory.copy_ledger(plan.budget.ledger.path), ending)
    said = _statement(context, loop)
    privacy = record(said) | ending.facts()
    return said, _tried("privacy.json", lambda: directory.write_json("privacy.json", privacy), ending)


def _tried(what: str, write: Callable[[], None], ending: Ending) -> Ending:
    """Write one item and return the ending, changed if the write failed."""
    try:
        write()
    except OSError as error:
        if not is_disk_full(error):
            return Ending("error", f"{ending.why or 'stopped'}; {what} could not be written: {error.strerror}")
        return Ending("disk", f"{ending.why or 'the disk is full'}; {what} could not be written")
    return ending


def _report(context: RunContext, loop: RoundLoop, ending: Ending) -> None:
    """Write `evaluation.json` and the report, and finish tracking."""
    directory, score = context.directory, context.score
    if score is not None:
        _attempt(EVALUATION, lambda: directory.write_json(EVALUATION, score.in_detail(loop.kept)))
    if context.plan.config.report:
        _attempt(REPORT, lambda: _write_page(directory.path))
    if context.tracker is not None:
        context.tracker.finish(ending)


def _attempt(name: str, write: Callable[[], None]) -> None:
    """Write an optional file; log a failure as a warning."""
    try:
        write()
    except Exception as error:  # its text stays out: it may hold values of arrays
        logger.warning("%s was not written: %s", name, type(error).__name__)


def _write_page(path: Path) -> None:
    """Write `report.html`; import the renderer here, after training."""
    from cloister.server.reports.html.page import write_report

    write_report(path)


def _send_final_models(context: RunContext, loop: RoundLoop, stop: Stop) -> None:
    """Send the nodes their personalised models, and log a failure as a warning.

    The run has saved its own model by then. A request to stop ends this step only.
    """
    plan = context.plan
    public: dict[str, str | int] = {SEED: plan.seed, ROUND: loop.aggregated, **frozen_digest_field(context.model)}
    try:
        with stop.waiting():
            personalise(loop.grid, loop.kept, public, plan.hypotheses)
    except StopAsked:
        logger.warning("asked to stop: nodes may not have the last models")
    except Exception as error:
        logger.warning("nodes may not have the last models: %s: %s", type(error).__name__, error)


def _statement(context: RunContext, loop: RoundLoop) -> Statement:
    """Return the privacy statement about all releases of the run."""
    plan, layout, resumed = context.plan, context.layout, context.plan.resumes > 0
    # An end by choice (early stopping, the operator, clients that leave) may depend on the releases. The statement then
    # covers all planned rounds. A budget ends a run by values that are fixed in advance.
    ended_by_choice = loop.ending.how != "budget" and loop.aggregated < plan.config.num_rounds
    asked = plan.config.num_rounds if ended_by_choice else loop.asked
    # Where no client was asked, or all abstained, no client trained. Budgets and policies decide that by public
    # numbers, without data.
    measured = [done.measured for done in context.rounds if done.number]
    untrained = not resumed and loop.asked == len(measured)
    untrained &= all(m is not None and m.asked == sum(item.abstained for item in m.rejected) for m in measured)
    rounds = 0 if untrained else asked + plan.resumes
    if resumed and (events := plan.strategy.events(layout)):
        # A directory that was put back to an earlier state does not know of all rounds.
        rounds = max(rounds, len(plan.budget.of_run()) // len(events))
    clients = client_claim(plan, layout, rounds, context.sizes, context.shared, context.attested)
    if clients is not None:
        clients = as_shown(clients, loop.grid, resumed)
        clients = clients.counting(ALL_PLANNED) if ended_by_choice and rounds else clients
    said = statement(
        as_shown(plan.claim, loop.grid, resumed),
        plan.budget,
        loop.aggregated,
        render_sampling(plan),
        clients,
        plan.planned(layout) if ended_by_choice else None,
        resumed,
        is_shared_ledger(plan, context.directory.path),
    )
    return replace(said, simulated=context.simulated)


def as_shown(claim: AnyClaim, grid: Grid, resumed: bool, ended: bool = True) -> AnyClaim:
    """Return a claim with the premises that the grid of the run shows.

    Args:
        claim: of the mechanism on the server, or on the clients.
        grid: of the run.
        resumed: whether the run was resumed; the transport of its earlier messages is then unknown.
        ended: whether all messages were sent. A later message may be neither packed nor signed.
    """
    found = (None if resumed else transport_of(grid)) or Transport(False, False)
    in_process = is_in_process(grid)
    way = of_transport(in_process, found.gated, found.packed and ended, found.signed and ended)
    shown = (*way, *of_runtime(in_process))
    return replace(claim, premises=known_by(claim.premises, shown))


def _save_memories(context: RunContext, grid: Grid) -> None:
    """Save the state of in-process nodes, after replies and before the server uses them."""
    if isinstance(grid, StatefulGrid) and (memories := grid.memories()):
        context.directory.write_json(NODES, memories)


def render_sampling(plan: Plan) -> str:
    """Return the sampling in words, and whether the claim uses amplification."""
    if plan.samples_by_itself:
        return f"by the strategy {type(plan.strategy.inner).__name__} itself, no amplification claimed"
    chosen = plan.config.strategy
    words = f"{chosen.sampling}, {100 * chosen.fraction_train:.4g} % of the nodes"
    if plan.strategy.draws_are_seen:
        return f"{words}, no amplification claimed: over Flower's own SuperLink nodes may learn who was drawn"
    amplified = plan.strategy.has_secret_cohorts
    return f"{words}, {'amplification accounted for' if amplified else 'no amplification claimed'}"


@contextmanager
def _observers(context: RunContext, grid: Grid) -> Iterator[list[Observer]]:
    """Yield the observers of every round, first the one that saves the model."""
    plan, directory = context.plan, context.directory

    def save(done: Round, arrays: ArrayRecord) -> None:
        directory.checkpoint(done.number, arrays)
        directory.append_round(done.line(plan.strategy.has_secret_cohorts, plan.hides_times))
        context.rounds.append(done)

    def settle_round(done: Round, arrays: ArrayRecord) -> None:
        """Save the progress, so that an interrupted run resumes after this round."""
        progress = Progress.of(done.number, arrays, stateful_objects(plan, context.stopping, context.attested))
        progress.save(directory, plan.config.keep_checkpoints)

    told: list[Observer] = [settle_round, context.narrator, *([context.tracker] if context.tracker else [])]
    if not plan.config.tensorboard:
        yield [save, *told]
        return
    from cloister.server.reports.loggers import TensorBoardObserver

    secret = plan.strategy.has_secret_cohorts
    after = context.earlier.last_round if context.earlier else None
    board = TensorBoardObserver(directory.path / "tensorboard", plan.hides_times, secret, after)
    try:
        yield [save, board, *told]
    finally:
        board.close()
