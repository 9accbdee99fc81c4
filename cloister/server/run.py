"""Execution of one run, from its configuration to its run directory."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from cloister.config.run import RunConfig
from cloister.core.arrays import Layout, from_record
from cloister.core.crash import write_traces_to
from cloister.core.errors import CloisterError, DataError
from cloister.core.hypotheses import unstacked
from cloister.core.wire import ROUND, SEED
from cloister.privacy.claims.claim import Claim, ClientClaim, Statement
from cloister.privacy.claims.premises import known_by, of_runtime, of_transport
from cloister.privacy.claims.record import record, running
from cloister.privacy.claims.server import ALL_PLANNED, statement
from cloister.privacy.dpsgd.local_steps import Holders, LocalSteps
from cloister.server.attested import Attested
from cloister.server.budgets import refuse_impossible_budget
from cloister.server.build import Plan
from cloister.server.clients import client_claim, personalise, shared_units, sizes_known
from cloister.server.drowning import drowned
from cloister.server.ending import Ended, Ending, ending_of, is_disk_full
from cloister.server.evaluation import CentralEvaluation
from cloister.server.lasting import (
    confine_ledger,
    draws_are_seen,
    is_in_process,
    is_lasting,
    is_simulated,
    refuse_closing,
    refuse_forgetful_nodes,
    render_budget,
    warn_of_other_names,
)
from cloister.server.loop import Observer, Round, RoundLoop
from cloister.server.prepare import prepare
from cloister.server.progress import Progress, stateful_objects
from cloister.server.quorum import Quorum
from cloister.server.reply_size import MAXIMUM
from cloister.server.reports.console import Narrator
from cloister.server.reports.jsonlog import JsonNarrator
from cloister.server.reports.rundir import EVALUATION, PARAMETERS, REPORT, RunDirectory, refuse_name
from cloister.server.resume import (
    NODES,
    Earlier,
    Remembering,
    earlier_run,
    forget_nodes,
    note_ledger,
    refuse_other_ledger,
    remember,
)
from cloister.server.sites import Sites
from cloister.server.stop import Stop, StopAsked
from cloister.server.stopping import EarlyStopping
from cloister.server.stragglers import Transport, transport_of
from cloister.server.times import settle, settle_archive
from cloister.tasks.base import Model
from cloister.tasks.faults import refuse_faulty
from cloister.tasks.frozen import Parameters, told_of

if TYPE_CHECKING:
    from cloister.server.reports.tracking import MlflowTracker

logger = logging.getLogger("cloister.server")
AnyClaim = TypeVar("AnyClaim", bound=Claim)


@dataclass(frozen=True)
class Outcome:
    """Result of a run that ended without an exception.

    Attributes:
        arrays: the global model that it keeps.
        rounds: number 0 is the initial model. Those before the run was resumed have their scores alone.
        directory: where everything is.
        plan: what it was made of.
        statement: what may be said about its privacy.
        stopped: why it ended early; empty if it did not.
        ended: how it ended, by one of the words of `Ending`; never `no-replies` nor `error`, which are raised.
        transport: what kept nodes from learning about each other; None: no SuperLink handed messages on.
        attested: what nodes stated of their clients and ledgers.
    """

    arrays: ArrayRecord
    rounds: list[Round]
    directory: RunDirectory
    plan: Plan
    statement: Statement
    stopped: str
    ended: Ended = "as-asked"
    transport: Transport | None = None
    attested: Attested = field(default_factory=Attested)

    @property
    def privacy(self) -> dict[str, object]:
        """The content of `privacy.json`."""
        return record(self.statement) | Ending(self.ended, self.stopped).facts() | self.attested.facts()


@dataclass(frozen=True)
class _Scene:
    """State that the steps of a run share."""

    plan: Plan
    model: Model
    layout: Layout
    directory: RunDirectory
    narrator: Narrator
    score: CentralEvaluation | None
    stopping: EarlyStopping
    earlier: Earlier | None = None
    tracker: "MlflowTracker | None" = None
    rounds: list[Round] = field(default_factory=list)
    sites: Sites = field(default_factory=Sites)
    sizes: tuple[LocalSteps, ...] = ()
    shared: frozenset[Holders] | None = None
    simulated: bool = False
    attested: Attested = field(default_factory=Attested)

    @property
    def progress(self) -> Progress | None:
        """Return the saved state of a resumed run; None for a new run."""
        return None if self.earlier is None else self.earlier.progress


def run(grid: Grid, config: RunConfig, narrator: Narrator | None = None, clients: int = 0) -> Outcome:
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
    refuse_forgetful_nodes(config, grid)
    with ExitStack() as stack:
        earlier = _earlier(config, grid, clients, stack)
        prepared = prepare(config, earlier=earlier, draws_are_seen=draws_are_seen(grid))
        refuse_closing(prepared.plan, grid)
        if earlier is None:
            refuse_impossible_budget(prepared)
        plan, model, score = prepared.plan, prepared.model, _central(prepared.plan, prepared.model)
        refuse_faulty(plan.task, model, score.examples if score else None)
        narrator = narrator or (JsonNarrator if config.log_format == "json" else Narrator)(config.num_rounds)
        stopping = EarlyStopping(config.evaluation.patience, config.privacy.split_round)
        directory = _directory(plan, grid, clients, earlier, stack)
        attested = Attested(plan.strategy.has_secret_cohorts)
        scene = _Scene(plan, model, prepared.layout, directory, narrator, score, stopping, earlier, attested=attested)
        scene = replace(
            scene, sizes=sizes_known(plan, grid), shared=shared_units(plan, grid), simulated=is_simulated(grid)
        )
        _enter(scene, grid)
        scene = _open(scene, grid, stack, clients)
        with Stop().listening() as stop, _observers(scene, grid) as observers:
            loop = _loop(scene, grid, observers, stop)
            with narrator.live(grid, scene.sites):
                failure = _driven(loop, prepared.initial, config.num_rounds, scene.progress)
            said, ending = _save(scene, loop)
            if plan.hypotheses and failure is None:
                public: dict[str, str | int] = {SEED: plan.seed, ROUND: loop.aggregated, **told_of(model)}
                _hand_out(stop, lambda: personalise(grid, loop.kept, public, plan.hypotheses))
        seconds = time.perf_counter() - started
        _report(scene, loop, ending)
        with suppress(OSError) if failure else nullcontext():  # what is full may be the disk that the console is on
            _close(scene, loop, said, ending, seconds)
    if failure is not None and ending.how != "disk":
        raise failure
    if ending.how == "error":
        raise CloisterError(ending.why)
    return Outcome(loop.kept, scene.rounds, directory, plan, said, ending.why, ending.how, transport_of(grid), attested)


def _earlier(config: RunConfig, grid: Grid, clients: int, stack: ExitStack) -> Earlier | None:
    """Return the run to resume; for a new run, verify its name and return None."""
    if config.resume:
        return stack.enter_context(earlier_run(config, grid, clients))
    refuse_name(config)
    return None


def _directory(plan: Plan, grid: Grid, clients: int, earlier: Earlier | None, stack: ExitStack) -> RunDirectory:
    """Return a new run directory, or that of the resumed run.

    A new directory is removed again if the run does not begin.
    """
    if earlier is None:
        directory = stack.enter_context(RunDirectory.create(plan, grid.run.fab_hash, clients).begun())
    else:
        directory = earlier.directory
    directory.announce()  # at once: a process killed from here on is resumed; begun anew, it would find its name taken
    return directory


def _central(plan: Plan, model: Model) -> CentralEvaluation | None:
    """Return the evaluation on the server's examples.

    It is None if the configuration switches it off, or if `auto` finds no examples on the server.

    Raises:
        DataError: the server has no examples, and the configuration requires them, directly or for early stopping.
    """
    asked = plan.config.evaluation
    if not asked.central:
        return None
    try:
        return CentralEvaluation(plan.task, model, plan.hypotheses, bool(plan.config.strategy.pretrain_epochs))
    except DataError as error:
        if asked.central is True or (asked.patience and not plan.config.evaluates_on_clients):
            raise
        logger.warning("models are not scored on the server: %s", error)
        return None


def _tracker(scene: _Scene, stack: ExitStack) -> "MlflowTracker | None":
    """Return the MLflow tracker, closed at the end of the run; None if it is off."""
    if scene.plan.config.tracking == "none":
        return None
    from cloister.server.reports.tracking import MlflowTracker

    tracker = MlflowTracker(scene.plan, scene.directory)
    stack.callback(tracker.close)
    return tracker


def _enter(scene: _Scene, grid: Grid) -> None:
    """Prepare the run directory and restore the state of a resumed run."""
    directory, layout = scene.directory, scene.layout
    # Reserve twice the size of the model: a new archive is written before it replaces the old one.
    directory.reserve(2 * layout.size * np.dtype(layout.dtype).itemsize)
    write_traces_to(directory.path, scene.plan.hides_times)
    confine_ledger(scene.plan, grid, directory.path)
    refuse_other_ledger(directory, scene.plan.budget.ledger)
    if scene.earlier is not None:
        _go_on(scene, scene.earlier, grid)


def _go_on(scene: _Scene, earlier: Earlier, grid: Grid) -> None:
    """Check that the run may resume, restore its state, and cut later records."""
    plan, directory, progress = scene.plan, scene.directory, earlier.progress
    if progress is not None:
        progress.restore(stateful_objects(plan, scene.stopping, scene.attested))
    earlier.refuse_more_rounds(plan.config, plan.claim.is_guaranteed or plan.config.privacy.client.is_on)
    split = None if plan.held_out is None else plan.held_out.split
    remember(grid, earlier, split, plan.strategy.has_secret_cohorts)
    scene.rounds.extend(map(Round.of_line, directory.cut(earlier.last_round)))
    after = (*earlier.resumed_after, *([] if progress is None else [progress.round]))
    directory.go_on(plan, after, grid.run.fab_hash)


def _open(scene: _Scene, grid: Grid, stack: ExitStack, clients: int) -> _Scene:
    """Begin the budget, and say what is about to happen, also to another system."""
    scene = replace(scene, tracker=_tracker(scene, stack))
    plan, directory = scene.plan, scene.directory
    if plan.strategy.has_secret_cohorts:
        # The run directory must not reveal how often each client was drawn.
        stack.callback(forget_nodes, directory)
    # Render the budget first: entries from here on count as spent.
    room = [] if scene.rounds else render_budget(plan, scene.layout, directory.path)
    renamed = warn_of_other_names(plan, directory.path)
    plan.budget.begin(directory.name)
    for reason in plan.unprotected_releases:
        plan.budget.record_unprotected(reason)
    note_ledger(directory, plan.budget.ledger)
    epsilon = plan.maximum_epsilon(scene.layout)
    claim = as_shown(plan.claim, grid, plan.resumes > 0, ended=False)
    scene.narrator.opening(plan, directory, claim, epsilon)
    if renamed:
        scene.narrator.note(f"warning: {renamed}")
    for line in room:
        scene.narrator.note(line)
    for remark in drowned(plan, scene.layout, clients or plan.config.strategy.min_nodes, scene.sizes):
        scene.narrator.note(f"warning: {remark}")
    parameters = Parameters.of(scene.model)
    directory.write_json(PARAMETERS, asdict(parameters))
    if parameters.frozen:
        scene.narrator.note(f"model          {parameters}")
    if scene.rounds:
        scene.narrator.resuming(scene.rounds[-1], plan, epsilon)
    directory.write_json("privacy.json", running(plan.claim))
    return scene


def _loop(scene: _Scene, grid: Grid, observers: list[Observer], stop: Stop) -> RoundLoop:
    config = scene.plan.config
    return RoundLoop(
        grid,
        scene.plan.strategy,
        scene.score,
        observers,
        {SEED: scene.plan.seed, **told_of(scene.model)},
        config.round_timeout,
        config.evaluation.every,
        scene.stopping,
        stop,
        judged_by_clients=config.evaluates_on_clients,
        quorum=Quorum.of(config),
        to_the_end=scene.plan.is_accounted,
        told=scene.narrator.note,
        sites=scene.sites,
        answered=lambda: _save_memories(scene, grid),
        attested=scene.attested,
    )


def _driven(
    loop: RoundLoop, initial: ArrayRecord, rounds: int, progress: Progress | None = None
) -> BaseException | None:
    """Run the rounds and return the exception that ended them, or None."""
    MAXIMUM.follow(initial)
    try:
        loop.run(initial, rounds, None if progress is None else progress.round)
    except BaseException as error:
        if loop.ending.how == "as-asked":
            loop.ending = ending_of(error)
        return error
    return None


def _save(scene: _Scene, loop: RoundLoop) -> tuple[Statement, Ending]:
    """Write the model, the canaries, the ledger's copy and `privacy.json`."""
    scene.directory.make_room()
    ending = loop.ending
    for what, write in (
        ("the model", lambda: _save_models(scene, loop.kept)),
        ("canaries.json", lambda: _save_canaries(scene)),
        ("the copy of the ledger", lambda: scene.directory.copy_ledger(scene.plan.budget.ledger.path)),
    ):
        ending = _tried(what, write, ending)
    said = _statement(scene, loop)
    privacy = record(said) | ending.facts() | scene.attested.facts()
    ending = _tried("privacy.json", lambda: scene.directory.write_json("privacy.json", privacy), ending)
    return said, ending


def _tried(what: str, write: Callable[[], None], ending: Ending) -> Ending:
    """Write one item and return the ending, changed if the write failed."""
    try:
        write()
    except OSError as error:
        if not is_disk_full(error):
            return Ending("error", f"{ending.why or 'stopped'}; {what} could not be written: {error.strerror}")
        return Ending("disk", f"{ending.why or 'the disk is full'}; {what} could not be written")
    return ending


def _save_models(scene: _Scene, kept: ArrayRecord) -> None:
    for name, arrays in _named_models(scene.plan, from_record(kept)).items():
        path = scene.directory.path / f"{name}{scene.model.suffix}"
        scene.model.assign(arrays)
        scene.model.save(path)
        if scene.directory.coarse:
            settle_archive(path)
    scene.directory.settle()


def _save_canaries(scene: _Scene) -> None:
    canaries = scene.plan.strategy.canaries
    if len(canaries):
        scene.directory.write_json("canaries.json", canaries.facts())


def _report(scene: _Scene, loop: RoundLoop, ending: Ending) -> None:
    """Write `evaluation.json` and the report, and finish tracking."""
    directory, score = scene.directory, scene.score
    if score is not None:
        _attempt(EVALUATION, lambda: directory.write_json(EVALUATION, score.in_detail(loop.kept)))
    if scene.plan.config.report:
        _attempt(REPORT, lambda: _write_page(directory.path))
    if scene.tracker is not None:
        scene.tracker.finish(ending)


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


def _close(scene: _Scene, loop: RoundLoop, said: Statement, ending: Ending, seconds: float) -> None:
    best = loop.stopping.best_round if loop.stopping.best is not None else loop.aggregated
    kept = next((done for done in scene.rounds if done.number == best), None)
    scene.narrator.closing(scene.plan, scene.directory, said, ending, kept, seconds)


def _named_models(plan: Plan, arrays: Mapping[str, NDArray]) -> dict[str, Mapping[str, NDArray]]:
    """Return the final model, or every hypothesis, by the stem of its file name."""
    if not plan.hypotheses:
        return {"model": arrays}
    return {f"hypothesis-{number}": model for number, model in enumerate(unstacked(arrays))}


def _hand_out(stop: Stop, personalised: Callable[[], None]) -> None:
    """Send the nodes their personalised models, and log a failure as a warning.

    The run has saved its own model by then. A request to stop ends this step only.
    """
    try:
        with stop.waiting():
            personalised()
    except StopAsked:
        logger.warning("asked to stop: nodes may not have the last models")
    except Exception as error:
        logger.warning("nodes may not have the last models: %s: %s", type(error).__name__, error)


def _statement(scene: _Scene, loop: RoundLoop) -> Statement:
    """Return the privacy statement about all releases of the run."""
    plan, layout = scene.plan, scene.layout
    # An end by choice (early stopping, the operator, clients that leave) may depend on the releases. The statement then
    # covers all planned rounds. A budget ends a run by values that are fixed in advance.
    ended_by_choice = loop.ending.how != "budget" and loop.aggregated < plan.config.num_rounds
    asked = plan.config.num_rounds if ended_by_choice else loop.asked
    sampling, resumed = render_sampling(plan), plan.resumes > 0
    claim = as_shown(plan.claim, loop.grid, resumed)
    clients = _client_claim(scene, loop, asked, ended_by_choice)
    planned = plan.planned(layout) if ended_by_choice else None
    lasting = is_lasting(plan, scene.directory.path)
    said = statement(claim, plan.budget, loop.aggregated, sampling, clients, planned, resumed, lasting)
    return replace(said, simulated=scene.simulated)


def as_shown(claim: AnyClaim, grid: Grid, resumed: bool, ended: bool = True) -> AnyClaim:
    """Return a claim whose premises are known as the grid of the run shows them.

    Args:
        claim: of the mechanism on the server, or on the clients.
        grid: of the run.
        resumed: whether the run was: what carried its earlier messages is not known.
        ended: whether all messages were sent; one that is still to come may be neither packed nor signed.
    """
    found = (None if resumed else transport_of(grid)) or Transport(False, False)
    in_process = is_in_process(grid)
    way = of_transport(in_process, found.gated, found.packed and ended, found.signed and ended)
    shown = (*way, *of_runtime(in_process))
    return replace(claim, premises=known_by(claim.premises, shown))


def _client_claim(scene: _Scene, loop: RoundLoop, asked: int, ended_by_choice: bool) -> ClientClaim | None:
    """What may be said about the clients' own mechanism; where no client trained, that nothing was released."""
    plan = scene.plan
    rounds = 0 if _nobody_trained(scene, loop) else asked + plan.resumes
    clients = client_claim(plan, scene.layout, rounds, scene.sizes, scene.shared, scene.attested)
    if clients is None:
        return None
    clients = as_shown(clients, loop.grid, plan.resumes > 0)
    return clients.counting(ALL_PLANNED) if ended_by_choice and rounds else clients


def _nobody_trained(scene: _Scene, loop: RoundLoop) -> bool:
    """Return whether no client was asked to train, or all abstained.

    Budgets and policies decide that by public numbers, without data.
    """
    measured = [done.measured for done in scene.rounds if done.number]
    if scene.plan.resumes or loop.asked != len(measured):
        return False
    return all(one is not None and one.asked == sum(item.abstained for item in one.rejected) for one in measured)


def _save_memories(scene: _Scene, grid: Grid) -> None:
    """Save the state of in-process nodes before the server aggregates."""
    if isinstance(grid, Remembering) and (memories := grid.memories()):
        scene.directory.write_json(NODES, memories)


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
def _observers(scene: _Scene, grid: Grid) -> Iterator[list[Observer]]:
    """Yield the observers of every round, first the one that saves the model."""
    plan, directory = scene.plan, scene.directory

    def save(done: Round, arrays: ArrayRecord) -> None:
        directory.checkpoint(done.number, arrays)
        directory.append_round(done.line(plan.strategy.has_secret_cohorts, plan.hides_times))
        if plan.hides_times and plan.budget.ledger.path.exists():
            settle(plan.budget.ledger.path)
        scene.rounds.append(done)

    def settle_round(done: Round, arrays: ArrayRecord) -> None:
        """Save the progress, so that an interrupted run resumes after this round."""
        _save_memories(scene, grid)
        progress = Progress.of(done.number, arrays, stateful_objects(plan, scene.stopping, scene.attested))
        progress.save(directory, plan.config.keep_checkpoints)

    told: list[Observer] = [settle_round, scene.narrator, *([scene.tracker] if scene.tracker else [])]
    if not plan.config.tensorboard:
        yield [save, *told]
        return
    from cloister.server.reports.tensorboard import TensorBoardObserver

    secret = plan.strategy.has_secret_cohorts
    after = scene.earlier.last_round if scene.earlier else None
    board = TensorBoardObserver(directory.path / "tensorboard", plan.hides_times, secret, after)
    try:
        yield [save, board, *told]
    finally:
        board.close()
