"""Progress of an audit, with the estimated remaining time: a bar in a terminal, some lines in a pipe."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from cloister.core.terminal import can_show, spoken

LINES = 8
"""Most progress lines of one audit in a pipe."""
REFRESHES = 2
"""Per second."""


class Progress:
    """Counter of an audit's completed units, with display.

    Args:
        console: output; None: no display.
        clock: returns seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._draws = console is not None and can_show(console)
        self._name, self._begun = "", clock()
        self._counted_from, self._amount, self._done = self._begun, 0.0, 0.0
        self._expected: float | None = None

    @contextmanager
    def audit(self, name: str) -> Iterator[None]:
        """Start the progress of an audit, and show it during the block.

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
        """Seconds since the audit began."""
        return self._clock() - self._begun

    def expect(self, amount: float, unit: str, each: float | None = None) -> None:
        """Set the planned work of the audit, and print its estimated duration.

        Args:
            amount: number of units, above 0.
            unit: their name, in words.
            each: seconds per unit; None: unknown before the first.
        """
        # Work before the units, such as importing a library, is excluded from the estimate.
        self._amount, self._done, self._counted_from = amount, 0.0, self._clock()
        self._expected = None if each is None else amount * each
        about = "how long they take is seen at the first" if each is None else f"about {spoken(amount * each)}"
        self._say(f"{self._name}: {amount:g} {unit}, {about}")

    def step(self, amount: float = 1.0) -> None:
        """Count units as done.

        Args:
            amount: number of units.
        """
        before, self._done = self._done, self._done + amount
        passed = self._amount and int(LINES * self._done / self._amount) > int(LINES * before / self._amount)
        if passed and not self._draws and self._done < self._amount:
            self._say(f"{self._name}: {self._standing()}")

    def left(self) -> float | None:
        """Estimate the remaining seconds; None before an estimate is possible."""
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
