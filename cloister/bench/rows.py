"""Rows of the benchmark table: actions timed with privacy and, if possible, without it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from cloister.bench.aggregation import Arrays, random_models, rounds, with_noise, without_noise
from cloister.bench.clock import Action, Times, in_turns
from cloister.bench.noise import NUMBERS, exact_numbers, mechanisms_on_messages, on_a_message
from cloister.bench.training import STEPS, plain_steps, private_steps
from cloister.core.errors import CloisterError
from cloister.privacy.mechanisms.discrete.sampler import kernel
from cloister.server.build import Plan

TRAINING, AGGREGATION, MESSAGE, NUMBER = 0.4, 0.4, 0.075, 0.05
"""Shares of the total time; the share of a message is used twice, for two kinds of noise."""


@dataclass(frozen=True)
class Row:
    """One timed action.

    Attributes:
        what: its name, in words.
        plain: without privacy; None: there is no such action.
        private: with privacy; None: it is impossible.
        why: the reason why it is impossible; empty if it is possible.
    """

    what: str
    plain: Times | None
    private: Times | None
    why: str = ""


def training(plan: Plan, seconds: float) -> Row:
    """Measure a training step, plain and of DP-SGD.

    Args:
        plan: of the run.
        seconds: time limit of the turns.
    """
    config, task = plan.config, plan.task
    what = "a training step, DP-SGD"
    return _row(what, lambda: plain_steps(config, task), lambda: private_steps(config, task), seconds, STEPS)


def aggregation(plan: Plan, arrays: Arrays, clients: int, cohort: int, seconds: float) -> Row:
    """Measure a round on the server, with its noise and without.

    Args:
        plan: of the run.
        arrays: of the model.
        clients, cohort: number of connected clients, and of clients that train.
        seconds: time limit of the turns.
    """
    noised, bare = with_noise(plan.config), without_noise(plan.config)
    trained = random_models(arrays, cohort)
    what = f"aggregation, {noised.privacy.server.name}"
    return _row(
        what,
        lambda: rounds(bare, arrays, trained, clients),
        lambda: rounds(noised, arrays, trained, clients),
        seconds,
    )


def messages(plan: Plan, arrays: Arrays, seconds: float) -> Iterator[tuple[str, Row]]:
    """Measure noise on a client's message, by mechanism.

    Args:
        plan: of the run.
        arrays: of the model.
        seconds: time limit of the turns of one mechanism.
    """
    (trained,) = random_models(arrays, 1)
    for name, mechanism in mechanisms_on_messages(plan.config).items():
        action = partial(on_a_message, mechanism, trained, arrays)
        yield name, _row(f"noise on a message, {name}", None, action, seconds)


def number(seconds: float) -> Row:
    """Measure one number of exact noise, on one thread.

    Args:
        seconds: time limit of the turns.
    """
    return _row(f"a number of exact noise, {kernel().NAME}", None, exact_numbers, seconds, NUMBERS)


def _row(
    what: str, plain: Callable[[], Action] | None, private: Callable[[], Action], seconds: float, parts: int = 1
) -> Row:
    """Measure actions of `parts` steps per turn; return the times of one step."""
    actions = {} if plain is None else {"plain": plain()}
    why = ""
    try:
        prepared = private()
        prepared()()
        actions["private"] = prepared
    except CloisterError as error:
        why = str(error)
    found = in_turns(actions, seconds)
    plain_times, private_times = (
        found[name].times(1 / parts) if name in found else None for name in ("plain", "private")
    )
    return Row(what, plain_times, private_times, why)
