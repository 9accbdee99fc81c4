"""Live progress of a run in a terminal: one line for each client, and the estimated remaining time."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cloister.core.terminal import spoken
from cloister.server.loop import Round
from cloister.server.sites import Sites
from cloister.server.watching import Standing

SHOWN = 10
"""Maximum number of clients with their own line; active clients come first."""
RECENT = 5
"""Number of recent rounds for the estimate of the remaining time."""
AT_WORK = ("training", "scoring")
REFRESHES = 2
"""Refreshes per second."""


@dataclass(frozen=True)
class Board:
    """State of the clients in the current round.

    Attributes:
        rounds: number of rounds.
        number: of the current round.
        clients: state by node id.
        rejected: code of a reply that did not count in the previous round, by node id.
        seconds: durations of the finished rounds.
    """

    rounds: int
    number: int = 1
    clients: Mapping[int, Standing] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    seconds: tuple[float, ...] = ()

    def told(self, node: int, standing: Standing) -> "Board":
        """Return the board with a changed state of one client.

        Args:
            node: its id.
            standing: its new state.
        """
        return replace(self, clients={**self.clients, node: standing})

    def finished(self, done: Round) -> "Board":
        """Return the board for the round after `done`, in which every client waits."""
        found = (*(done.measured.rejected if done.measured else ()), *done.unscored)
        return replace(
            self,
            number=done.number + 1,
            clients=dict.fromkeys(self.clients, "waiting"),
            rejected={item.node_id: item.code for item in found},
            seconds=(*self.seconds, done.seconds["total"]) if "total" in done.seconds else self.seconds,
        )

    def left(self, elapsed: float) -> float | None:
        """Return the estimated remaining seconds; None before the first round.

        Args:
            elapsed: seconds since this round began.
        """
        recent = self.seconds[-RECENT:]
        if not recent:
            return None
        return max(0.0, sum(recent) / len(recent) * (self.rounds - self.number + 1) - elapsed)

    def lines(self, sites: Sites) -> list[str]:
        """Return one line for each client; of many, lines for active ones.

        A last line counts the remaining clients by state.

        Args:
            sites: names of the nodes.
        """
        nodes = sorted(self.clients)
        if len(nodes) > SHOWN:
            nodes.sort(key=lambda node: self.clients[node] not in AT_WORK)
        names = {node: sites.name_of(node) for node in sorted(nodes[:SHOWN])}
        width = max(map(len, names.values()), default=0)
        lines = []
        for node, name in names.items():
            why = f"  round {self.number - 1}: {self.rejected[node]}" if node in self.rejected else ""
            lines.append(f"{name:<{width}}  {self.clients[node]}{why}")
        others = Counter(self.clients[node] for node in nodes[SHOWN:])
        if others:
            counted = ", ".join(f"{count} {standing}" for standing, count in sorted(others.items()))
            lines.append(f"and {others.total()} more: {counted}")
        return lines


class Screen:
    """Live display of a board at the lower end of a terminal, removed at the end.

    Args:
        rounds: number of rounds.
        sites: names of the nodes.
        clock: returns seconds.

    Attributes:
        board: the displayed one. It is replaced and never changed, since another thread draws it.
    """

    def __init__(self, rounds: int, sites: Sites, clock: Callable[[], float] = time.monotonic) -> None:
        self.board = Board(rounds)
        self._sites = sites
        self._clock = clock
        self._begun = clock()

    def watch(self, node: int, standing: Standing) -> None:
        """Update the state of a client."""
        self.board = self.board.told(node, standing)

    def observe(self, done: Round) -> None:
        """Update the board after a finished round."""
        self.board, self._begun = self.board.finished(done), self._clock()

    def on(self, console: Console) -> Live:
        """Return the live display as a context; other output appears above it."""
        return Live(self, console=console, refresh_per_second=REFRESHES, transient=True)

    def __rich__(self) -> Group:
        board = self.board
        head = Table.grid(padding=(0, 2))
        done = ProgressBar(board.rounds, board.number - 1, width=24)
        left = board.left(self._clock() - self._begun)
        told = "" if left is None else f"about {spoken(left)} left"
        head.add_row(f"round {min(board.number, board.rounds)}/{board.rounds}", done, told)
        return Group(head, *(Text(line) for line in board.lines(self._sites)))
