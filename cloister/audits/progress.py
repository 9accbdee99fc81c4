"""How far an audit is, and about how long the rest takes: a bar in a terminal, a line now and then in a pipe."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from cloister.core.terminal import can_show, spoken

LINES = 8
"""That a pipe gets of one audit, at most."""
REFRESHES = 2
"""A second."""


class Progress:
    """Takes note of how far the audit is that goes on, and tells it.

    Args:
        console: where it is told; None: nowhere.
        clock: seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._draws = console is not None and can_show(console)
        self._name, self._begun = "", clock()
        self._counted_from, self._amount, self._done = self._begun, 0.0, 0.0
        self._expected: float | None = None

    @contextmanager
    def audit(self, name: str) -> Iterator[None]:
        """The block in which an audit goes on.

        Args:
            name: of the audit.
        """
        self._name, self._begun, self._amount, self._done, self._expected = name, self._clock(), 0.0, 0.0, None
        self._counted_from = self._begun
        self._say(f"{name} ...")
        screen = Live(self, console=self._console, refresh_per_second=REFRESHES, transient=True)
        with screen if self._draws else nullcontext():
            yield

    @property
    def seconds(self) -> float:
        """Since the audit began."""
        return self._clock() - self._begun

    def expect(self, amount: float, unit: str, each: float | None = None) -> None:
        """Say what the audit is going to do, and about how long it takes.

        Args:
            amount: how many units, above 0.
            unit: what they are, in words.
            each: seconds that one takes; None: not known before the first.
        """
        # What an audit does before its units, such as to import a library, says nothing about them.
        self._amount, self._done, self._counted_from = amount, 0.0, self._clock()
        self._expected = None if each is None else amount * each
        about = "how long they take is seen at the first" if each is None else f"about {spoken(amount * each)}"
        self._say(f"{self._name}: {amount:g} {unit}, {about}")

    def step(self, amount: float = 1.0) -> None:
        """Take note of units that are done.

        Args:
            amount: how many.
        """
        before, self._done = self._done, self._done + amount
        passed = self._amount and int(LINES * self._done / self._amount) > int(LINES * before / self._amount)
        if passed and not self._draws and self._done < self._amount:
            self._say(f"{self._name}: {self._standing()}")

    def left(self) -> float | None:
        """About how many seconds the rest takes; None before that can be said."""
        taken = self._clock() - self._counted_from
        if self._done:
            return taken * max(0.0, self._amount - self._done) / self._done
        return None if self._expected is None else max(0.0, self._expected - taken)

    def __rich__(self) -> Table:
        line = Table.grid(padding=(0, 2))
        line.add_row(self._name, ProgressBar(self._amount or 1.0, self._done, width=24), self._standing())
        return line

    def _standing(self) -> str:
        left = self.left()
        return f"{self._done:g} of {self._amount:g}" + ("" if left is None else f", about {spoken(left)} left")

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text)
