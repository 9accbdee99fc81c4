"""One run, from its configuration to its run directory."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.config import RunConfig
from cloister.core.crash import write_traces_to
from cloister.core.hypotheses import stacked, unstacked
from cloister.core.wire import ROUND, SEED
from cloister.privacy.claim import running, statement
from cloister.privacy.decorators import GlobalDP
from cloister.server.build import Plan, build
from cloister.server.clients import client_statement, personalise
from cloister.server.console import Narrator
from cloister.server.evaluation import CentralEvaluation
from cloister.server.jsonlog import JsonNarrator
from cloister.server.lasting import confine_ledger
from cloister.server.loop import Observer, Round, RoundLoop
from cloister.server.rundir import RunDirectory
from cloister.server.stop import Stop, StopAsked
from cloister.server.stopping import EarlyStopping
from cloister.tasks.base import Model

logger = logging.getLogger("cloister.server")


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        arrays: its last global model.
        rounds: number 0 is the initial model.
        directory: where everything is.
        plan: what it was made of.
        privacy: the content of `privacy.json`.
        stopped: why it ended early; empty if it did not.
    """

    arrays: ArrayRecord
    rounds: list[Round]
    directory: RunDirectory
    plan: Plan
    privacy: dict[str, Any]
    stopped: str


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
    initial = to_record(_initial(plan, model))
    score = CentralEvaluation(plan.task, model, plan.hypotheses) if config.evaluation.central else None
    layout = Layout.of(from_record(initial))
    if config.privacy.noise_multiplier == "auto" and isinstance(plan.strategy, GlobalDP):
        plan.strategy.calibrate(layout, config.num_rounds)
    directory = RunDirectory.create(plan)
    write_traces_to(directory.path)
    confine_ledger(plan, grid, directory.path)
    plan.books.begin(directory.path.name)
    for reason in plan.confessions:
        plan.books.confess(reason)
    narrator = narrator or (JsonNarrator if config.log_format == "json" else Narrator)(config.num_rounds)
    narrator.opening(plan, directory)
    directory.write_json("privacy.json", running(plan.claim))
    rounds: list[Round] = []
    with Stop().listening() as stop, _observers(plan, directory, narrator, rounds) as observers:
        loop = RoundLoop(
            grid,
            plan.strategy,
            score,
            observers,
            {SEED: plan.seed},
            config.round_timeout,
            config.evaluation.every,
            EarlyStopping(config.evaluation.patience),
            stop,
            judged_by_clients=config.evaluates_on_clients,
        )
        try:
            arrays = loop.run(initial, config.num_rounds)
        finally:
            privacy = _state_privacy(plan, directory, layout, loop.aggregated, loop.asked)
        for name, arrays_of_one in _named_models(plan, from_record(arrays)).items():
            model.assign(arrays_of_one)
            model.save(directory.path / f"{name}{model.suffix}")
        if plan.hypotheses:
            _hand_out(
                stop, lambda: personalise(grid, arrays, {SEED: plan.seed, ROUND: loop.aggregated}, plan.hypotheses)
            )
    narrator.closing(plan, directory, privacy, loop.stopped, time.perf_counter() - started)
    return Outcome(arrays, rounds, directory, plan, privacy, loop.stopped)


APART = 0.01
"""Standard deviation by which hypotheses are moved apart where a model has but one way to begin."""


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


def _named_models(plan: Plan, arrays: Mapping[str, NDArray]) -> dict[str, Mapping[str, NDArray]]:
    """The final model by the name of its file, or all hypotheses."""
    if not plan.hypotheses:
        return {"model": arrays}
    return {f"hypothesis-{number}": model for number, model in enumerate(unstacked(arrays))}


def _hand_out(stop: Stop, personalised: Callable[[], None]) -> None:
    """Give the nodes their last models, unless somebody asks to stop: the run has its own, and is not lost with it."""
    try:
        with stop.waiting():
            personalised()
    except StopAsked:
        logger.warning("asked to stop: nodes may not have the last models")
    except Exception as error:
        logger.warning("nodes may not have the last models: %s: %s", type(error).__name__, error)


def _state_privacy(plan: Plan, directory: RunDirectory, layout: Layout, rounds: int, asked: int) -> dict[str, Any]:
    """Write `privacy.json` and a copy of the ledger, whatever became of the run."""
    directory.copy_ledger(plan.books.ledger.path)
    clients = client_statement(plan, layout, asked)
    facts = statement(plan.claim, plan.books, rounds, sampling_in_words(plan), clients)
    directory.write_json("privacy.json", facts)
    return facts


def sampling_in_words(plan: Plan) -> str:
    """How cohorts were drawn, and whether that was accounted for."""
    chosen = plan.config.strategy
    words = f"{chosen.sampling}, {100 * chosen.fraction_train:.4g} % of the nodes"
    amplified = plan.strategy.has_secret_cohorts
    return f"{words}, {'amplification accounted for' if amplified else 'no amplification claimed'}"


@contextmanager
def _observers(
    plan: Plan, directory: RunDirectory, narrator: Narrator, rounds: list[Round]
) -> Iterator[list[Observer]]:
    """Those who are told of every round: the model is safe before anybody reads about it."""

    def save(done: Round, arrays: ArrayRecord) -> None:
        directory.checkpoint(done.number, arrays, plan.config.keep_checkpoints)
        directory.append_round(done.line(plan.strategy.has_secret_cohorts))
        rounds.append(done)

    if not plan.config.tensorboard:
        yield [save, narrator]
        return
    from cloister.server.tensorboard import TensorBoardObserver

    board = TensorBoardObserver(directory.path / "tensorboard")
    try:
        yield [save, narrator, board]
    finally:
        board.close()
