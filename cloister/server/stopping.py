"""Ends of a run: requests by signals, early stopping on the best score, and the reason that is reported.

A request is SIGTERM (a service manager, `docker stop`) or SIGINT (Ctrl-C). Flower sends SIGINT to the ServerApp when
the run is stopped, or the SuperLink or the ServerApp's parent has ended. A second request ends the process at once. A
SIGINT soon after the first request is ignored: one stop of all server processes makes Flower send it too.
"""

import errno
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord

from cloister.tasks.scores import is_smaller_better
from cloister.utils.arrays import State, from_record, joined, part, to_record
from cloister.utils.errors import BudgetExhausted, CloisterError, TooFewNodes

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 30.0
"""Seconds after the first request during which a SIGINT counts as its echo."""
WAKE_SECONDS = 0.1
"""Seconds between attempts to wake the main thread."""
Ended = Literal["as-asked", "budget", "site-budgets", "operator", "too-few-nodes", "disk", "no-replies", "error"]
FULL = (errno.ENOSPC, errno.EDQUOT)


class StopAsked(BaseException):
    """Request to end the run. It is no `Exception`, so that handlers of errors do not catch it."""


class Stop:
    """Listener for requests to end.

    Attributes:
        asked: the name of the signal; empty without a request.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._since = 0.0
        self._waiting = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Handle signals within the block, in the main thread only."""
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self._waking())
                self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
            stack.callback(self._restore)
            yield self

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Raise within the block as soon as a request arrives.

        Raises:
            StopAsked: on a request, including an earlier one.
        """
        self._waiting = True
        try:
            if self.asked:
                raise StopAsked(self.asked)
            yield
        finally:
            self._waiting = False

    @contextmanager
    def _waking(self) -> Iterator[None]:
        """Interrupt a waiting main thread when another thread raises a request.

        Flower's threads raise SIGINT when the SuperLink or their parent is gone. Python runs handlers in the main
        thread only, which may wait without a timeout for threads that retry sending objects for ever. Only a signal
        that the main thread itself receives interrupts such a wait.
        """
        heard, told = socket.socketpair()
        told.setblocking(False)
        handler = signal.signal(signal.SIGURG, lambda *_: None)
        descriptor = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        done = threading.Event()
        waker = threading.Thread(target=self._wake, args=(heard, threading.get_ident(), done), daemon=True)
        waker.start()
        try:
            yield
        finally:
            done.set()
            signal.set_wakeup_fd(descriptor)
            told.close()
            waker.join()
            heard.close()
            signal.signal(signal.SIGURG, handler)

    def _wake(self, heard: socket.socket, main_thread: int, done: threading.Event) -> None:
        """Interrupt the main thread until it has handled each request.

        Python sends the number of every signal to `heard`.
        """
        while number := heard.recv(1):
            # After `done`, the previous handler receives a request instead.
            while number[0] in SIGNALS and not self.asked and not done.is_set():
                signal.pthread_kill(main_thread, signal.SIGURG)
                done.wait(WAKE_SECONDS)

    def _hear(self, number: int, _: object) -> None:
        if self.asked:  # only SIGINT still has this handler
            if time.monotonic() - self._since > ECHO_SECONDS:
                self._restore()
                signal.raise_signal(number)
            return
        self.asked, self._since = signal.Signals(number).name, time.monotonic()
        if (before := self._before.pop(signal.SIGTERM, None)) is not None:
            signal.signal(signal.SIGTERM, before)
        if self._waiting:
            self._waiting = False
            raise StopAsked(self.asked)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class EarlyStopping:
    """Early stopping that keeps the best model.

    Args:
        patience: evaluations without a better score after which to stop; 0: never.
        first_round: evaluations before it do not count.
        criterion: name of the score; `is_smaller_better` says which are best at their least.

    Attributes:
        best: the model of the best score from `first_round` on; None before the first.
        best_round: its round.
    """

    def __init__(self, patience: int, first_round: int = 0, criterion: str = "loss") -> None:
        self.patience = patience
        self.first_round = first_round
        self.criterion = criterion
        self._sign = 1 if is_smaller_better(criterion) else -1
        self.best: ArrayRecord | None = None
        self.best_round = 0
        self._smallest = math.inf
        self._since = 0

    def observe(self, number: int, scores: Mapping[str, float], arrays: ArrayRecord) -> bool:
        """Record the scores of a round and return whether to stop.

        Without scores, it returns False. Scores without the criterion, such as of a diverged model, are no better ones.
        """
        if not self.patience or not scores or number < self.first_round:
            return False
        signed = self._sign * scores.get(self.criterion, math.nan)
        if signed < self._smallest:
            self._smallest, self._since, self.best, self.best_round = signed, 0, arrays, number
        else:
            self._since += 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether `patience` evaluations in a row had no better score."""
        return 0 < self.patience <= self._since

    def state_dict(self) -> State:
        """Return the best model and the evaluations since; empty without patience."""
        if not self.patience:
            return {}
        numbers = {"round": self.best_round, "smallest": self._smallest, "since": self._since}
        best = {} if self.best is None else from_record(self.best)
        return {**{name: np.array(value) for name, value in numbers.items()}, **joined({"best": best})}

    def load_state_dict(self, state: State) -> None:
        """Restore the best model and the count of evaluations."""
        if not self.patience:
            return
        self.best_round, self._since = int(state["round"]), int(state["since"])
        self._smallest, best = float(state["smallest"]), part(state, "best")
        self.best = to_record(best) if best else None

    def why(self) -> str:
        """Return the message about the stop."""
        if self.best is None:
            return f"stopped: {self.patience} evaluations without a number as the score {self.criterion!r}"
        found = self._sign * self._smallest
        return (
            f"stopped: {self.patience} evaluations without a better {self.criterion} than {found:.4g}, that of round "
            f"{self.best_round}, whose model is kept"
        )


@dataclass(frozen=True)
class Ending:
    """End of a run.

    Attributes:
        how: `as-asked`: after all its rounds or by early stopping; `budget`: the next round would exceed it;
            `site-budgets`: all nodes of several rounds in a row refused for lack of budget; `operator`: by a request to
            stop; `too-few-nodes`: fewer nodes than `strategy.quorum` stayed connected; `disk`: the disk was full;
            `no-replies`: no reply counted; `error`: any other cause.
        why: the reason as a sentence; empty after all rounds.
    """

    how: Ended = "as-asked"
    why: str = ""

    def facts(self) -> dict[str, object]:
        """Return the fields of `privacy.json` about the end."""
        return {"ended": {"how": self.how, "why": self.why}}


def ending_of(error: BaseException) -> Ending:
    """Return the ending for an exception.

    The text of foreign exceptions is omitted, since it may contain data.
    """
    if is_disk_full(error):
        return Ending("disk", "stopped: the disk is full")
    if isinstance(error, KeyboardInterrupt):
        return Ending("operator", "stopped at once, on a second request")
    if not isinstance(error, CloisterError):
        return Ending("error", f"stopped by an unexpected {type(error).__name__}")
    if isinstance(error, TooFewNodes):
        return Ending("too-few-nodes", f"stopped: {error}")
    if isinstance(error, BudgetExhausted):
        return Ending("budget", f"stopped: {error}")
    return Ending("error", f"stopped by {type(error).__name__}: {error}")


def diverged(ending: Ending, models: Sequence[str], scores: Mapping[int, Mapping[str, float]]) -> Ending:
    """Return the ending of a run whose released models cannot be used.

    Args:
        ending: without regard to the models.
        models: names of the files whose weights or predictions are not finite.
        scores: of the server, by round.
    """
    good = [number for number, found in scores.items() if math.isfinite(found.get("loss", math.nan))]
    last = f"; the loss was last a finite number in round {good[-1]}" if good else ""
    return Ending(
        "error",
        f"{f'{ending.why}; ' if ending.why else ''}{' and '.join(models)} cannot be used: weights or predictions are "
        f"NaN or infinite{last}; lower client.learning-rate, or the rate of the strategy",
    )


def is_disk_full(error: BaseException) -> bool:
    """Return whether the exception, or one of its causes, reports a full disk."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return True
        cause = cause.__cause__
    return False
