"""One run, from its configuration to its run directory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from cloister.core.arrays import from_record, to_record
from cloister.core.config import RunConfig
from cloister.server.build import Plan, build
from cloister.server.console import Narrator
from cloister.server.evaluation import CentralEvaluation
from cloister.server.loop import Observer, Round, RoundLoop
from cloister.server.rundir import RunDirectory


@dataclass(frozen=True)
class Outcome:
    """A finished run: its last global model, its rounds (number 0 is the initial model), and where it is."""

    arrays: ArrayRecord
    rounds: list[Round]
    directory: RunDirectory
    plan: Plan


def run(grid: Grid, config: RunConfig, narrator: Narrator | None = None) -> Outcome:
    """Train on the clients that the grid reaches; leave everything in a new run directory.

    Args:
        grid: to the clients; who they are and how they are run is its business.
        config: of the run.
        narrator: tells a person; by default on standard output.

    Raises:
        CloisterError: the run cannot start, or nobody takes part in it.
    """
    started = time.perf_counter()
    plan = build(config)
    model = plan.task.build()
    model.initialise(plan.seed)
    initial = to_record(model.arrays())
    score = CentralEvaluation(plan.task, model) if config.evaluation.central else None
    directory = RunDirectory.create(plan)
    narrator = narrator or Narrator(config.num_rounds)
    narrator.opening(plan, directory)
    rounds: list[Round] = []
    with _observers(plan, directory, narrator, rounds) as observers:
        loop = RoundLoop(grid, plan.strategy, score, observers, {"seed": plan.seed}, config.round_timeout)
        try:
            arrays = loop.run(initial, config.num_rounds)
        finally:
            directory.write_claim(plan.claim, rounds=max(0, len(rounds) - 1), seeded=config.privacy.noise_seed != -1)
    model.assign(from_record(arrays))
    model.save(directory.path / f"model{model.suffix}")
    narrator.closing(plan, directory, time.perf_counter() - started)
    return Outcome(arrays, rounds, directory, plan)


@contextmanager
def _observers(
    plan: Plan, directory: RunDirectory, narrator: Narrator, rounds: list[Round]
) -> Iterator[list[Observer]]:
    """Those who are told of every round: the model is safe before anybody reads about it."""
    keep = plan.config.keep_checkpoints
    save: Observer = lambda done, arrays: directory.checkpoint(done.number, arrays, keep)  # noqa: E731
    write: Observer = lambda done, _: directory.append_round(done.line())  # noqa: E731
    remember: Observer = lambda done, _: rounds.append(done)  # noqa: E731
    close: Callable[[], None] = lambda: None  # noqa: E731
    observers: list[Observer] = [save, write, remember, narrator]
    if plan.config.tensorboard:
        from cloister.server.tensorboard import TensorBoardObserver

        board = TensorBoardObserver(directory.path / "tensorboard")
        observers.append(board)
        close = board.close
    try:
        yield observers
    finally:
        close()
