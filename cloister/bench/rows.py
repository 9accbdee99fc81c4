"""The rows of the table: what is timed with privacy, and without it where there is something to time."""

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
"""Shares of the time; there are two kinds of noise on a message."""


@dataclass(frozen=True)
class Row:
    """One thing that was timed.

    Attributes:
        what: in words.
        plain: without privacy; None: there is nothing to time.
        private: with privacy; None: it cannot be done.
        why: the reason that it cannot be done; empty if it can.
    """

    what: str
    plain: Times | None
    private: Times | None
    why: str = ""


def training(plan: Plan, seconds: float) -> Row:
    """A training step, plain and of DP-SGD.

    Args:
        plan: of the run.
        seconds: that turns may take.
    """
    config, task = plan.config, plan.task
    what = "a training step, DP-SGD"
    return _row(what, lambda: plain_steps(config, task), lambda: private_steps(config, task), seconds, STEPS)


def aggregation(plan: Plan, arrays: Arrays, clients: int, cohort: int, seconds: float) -> Row:
    """A round on the server, with its noise and without.

    Args:
        plan: of the run.
        arrays: of the model.
        clients, cohort: how many are connected, and how many of them train.
        seconds: that turns may take.
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
    """Noise on what a client sends, by mechanism.

    Args:
        plan: of the run.
        arrays: of the model.
        seconds: that the turns of one may take.
    """
    (trained,) = random_models(arrays, 1)
    for name, mechanism in mechanisms_on_messages(plan.config).items():
        action = partial(on_a_message, mechanism, trained, arrays)
        yield name, _row(f"noise on a message, {name}", None, action, seconds)


def number(seconds: float) -> Row:
    """One number of exact noise, on one thread.

    Args:
        seconds: that turns may take.
    """
    return _row(f"a number of exact noise, {kernel().NAME}", None, exact_numbers, seconds, NUMBERS)


def _row(
    what: str, plain: Callable[[], Action] | None, private: Callable[[], Action], seconds: float, parts: int = 1
) -> Row:
    """Time actions that make `parts` steps in a turn; the times are those of one step."""
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
