"""Console output of a run, as text or as JSON lines: settings and claim, one line a round, a live screen, results."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from flwr.serverapp import Grid
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cloister.config.io import as_pairs
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import changed, shown
from cloister.privacy.claims.claim import Claim, Statement
from cloister.privacy.claims.premises import to_json
from cloister.privacy.claims.render import contract, render, render_resumed, summary, summary_of_clients
from cloister.privacy.claims.to_json import record
from cloister.server.build import Plan
from cloister.server.ledger_location import render_ledger
from cloister.server.polling_grid import Standing, WatchedGrid, noop
from cloister.server.reports.rundir import REPORT, RunDirectory
from cloister.server.round import Round, Sites, published
from cloister.server.stopping import Ending
from cloister.utils.terminal import can_redraw, format_duration, table
from cloister.utils.text import at_least, at_most

SHOWN = 10
"""Maximum number of clients with their own line; active clients come first."""
RECENT = 5
"""Number of recent rounds for the estimate of the remaining time."""
AT_WORK = ("training", "scoring")
REFRESHES = 2
"""Refreshes per second."""
WIDTH = 110


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
        told = "" if left is None else f"about {format_duration(left)} left"
        head.add_row(f"round {min(board.number, board.rounds)}/{board.rounds}", done, told)
        return Group(head, *(Text(line) for line in board.lines(self._sites)))


class ConsoleReporter:
    """Console reporter of a run, for a terminal or a log.

    Args:
        rounds: number of rounds.
        console: by default, standard output.

    Attributes:
        draws: whether to show the state of the clients, if the console is a terminal.
        majority: accuracy of always answering the most frequent class of the server's examples; None: not known.
    """

    draws = True

    def __init__(self, rounds: int, console: Console | None = None) -> None:
        self.rounds = rounds
        self.console = console or Console(width=WIDTH, highlight=False, soft_wrap=True, markup=False)
        self.last: Round | None = None
        self.majority: float | None = None
        self.secret_cohorts = False
        self.hides_times = False
        self.screen: Screen | None = None

    def begin(self, plan: Plan) -> None:
        """Store whether to hide cohorts and durations, for secret draws."""
        self.secret_cohorts = plan.strategy.has_secret_cohorts
        self.hides_times = plan.hides_times

    def opening(self, plan: Plan, directory: RunDirectory, claim: Claim, epsilon: float | None = None) -> None:
        """Print the name of the run, its changed settings, and its claim in one line.

        Args:
            plan: of the run.
            directory: of the run.
            claim: of the plan, with the premises that the grid shows.
            epsilon: of all its rounds together; None without a guarantee.
        """
        config = plan.config
        self.begin(plan)
        self.console.print(f"Cloister  {config.task.name}, {config.strategy.name}, {config.num_rounds} rounds")
        self.console.print(f"run directory  {directory.path}")
        settings = as_pairs(changed(shown(config.flat())))
        self.console.print(f"settings       {settings or 'the defaults'}")
        self.console.print(f"privacy        {contract(claim, epsilon)}")
        if config.privacy.client.is_on:
            self.console.print(f"on clients     {contract_of_clients(config.privacy)}")
        for reason in claim.reasons:
            self.console.print(f"               because {reason}")
        if count := len(plan.strategy.canaries):
            self.console.print(f"canaries       {count}: {render_canaries(count)}")
        if self.majority is not None:
            self.console.print(f"majority       accuracy {self.majority:.4f}, by answering the commonest class only")

    @contextmanager
    def live(self, grid: Grid, sites: Sites) -> Iterator[None]:
        """Show the state of the clients on a terminal within the block.

        Call this after `opening`. Nothing is shown if it would reveal the drawn cohort, its size or a duration.

        Args:
            grid: of the run.
            sites: names of its nodes.
        """
        hidden = self.secret_cohorts or self.hides_times
        if hidden or not self.draws or not isinstance(grid, WatchedGrid) or not can_redraw(self.console):
            yield
            return
        self.screen = Screen(self.rounds, sites)
        grid.watch = self.screen.watch
        try:
            with self.screen.on(self.console):
                yield
        finally:
            grid.watch, self.screen = noop, None

    def resuming(self, last: Round, plan: Plan, epsilon: float | None) -> None:
        """Print the round of the resume, and the meaning of each later ε.

        Args:
            last: that round.
            plan: of the run.
            epsilon: as in `opening`.
        """
        self.last = last
        self.note(f"resumed after round {last.number}")
        for line in render_resumed(epsilon, plan.budget.max_epsilon):
            self.note(line)

    def note(self, text: str) -> None:
        """Print a message between rounds."""
        self.console.print(text)

    def __call__(self, done: Round, _: object) -> None:
        """Print one line for a finished round."""
        self.last = done
        if self.screen is not None:
            self.screen.observe(done)
        parts = [
            f"round {done.number:>3}/{self.rounds}",
            *(f"{name} {value:.4f}" for name, value in (done.central or done.federated).items()),
        ]
        if done.measured is not None:
            if done.measured.noise_std is not None:
                parts.append(f"noise std {done.measured.noise_std:.2e}")
            if done.measured.epsilon is not None:
                parts.append(f"ε {at_most(done.measured.epsilon, 3)}")
            if not self.secret_cohorts:
                parts.append(f"replies {done.measured.accepted}/{done.measured.asked}")
            if done.measured.abandoned:
                parts.append("abandoned")
            if not self.hides_times:
                parts.append(f"{done.seconds['total']:.1f} s")
        self.console.print("  ".join(parts))
        rejected = done.measured.rejected if done.measured and not self.secret_cohorts else ()
        for item in (*rejected, *done.unscored):
            self.console.print(f"           rejected: round {done.number}, {item.who}, {item.code}: {item.detail}")

    def closing(
        self,
        plan: Plan,
        directory: RunDirectory,
        statement: Statement,
        ending: Ending,
        kept: Round | None,
        seconds: float,
    ) -> None:
        """Print the reason for an early end, the results, and the privacy statement.

        Args:
            plan: of the run.
            directory: of the run.
            statement: the privacy statement of the run.
            ending: how the run ended.
            kept: the round whose model is kept, for its scores; None if that round did not finish.
            seconds: duration of the run.
        """
        if ending.why:
            self.console.print(ending.why)
        rows = [(name, f"{value:.4f}") for name, value in (kept.central if kept else {}).items()]
        if rows and self.majority is not None:
            rows.append(("accuracy of the majority class alone", f"{self.majority:.4f}"))
        rows += [(f"{name} (on clients)", f"{value:.4f}") for name, value in (kept.federated if kept else {}).items()]
        if kept and self.last and kept.number != self.last.number:
            rows.append(("the model kept is that of round", str(kept.number)))
        measured = self.last.measured if self.last else None
        if statement.clients is None:
            rows.append(("privacy", summary(statement.claim)))
        else:
            rows.append(("privacy on the server", summary(statement.claim)))
            rows.append(("privacy on clients", summary_of_clients(statement.clients)))
        if measured and measured.noise_std is not None:
            rows.append(("noise std on a weight, last round", f"{measured.noise_std:.3e}"))
        if measured and measured.noise_multiplier is not None:
            nominal = "" if plan.claim.is_guaranteed else "nominal "
            rows.append((f"{nominal}noise multiplier, last round", at_least(measured.noise_multiplier)))
        rows.append(("rounds", str(self.last.number if self.last else 0)))
        if not self.hides_times:
            rows.append(("seconds", f"{seconds:.1f}"))
        self.console.print(table(("", ""), rows, "Result", min_width=60))
        for line in (*render(statement), *render_ledger(plan, directory.path)):
            self.console.print(line)
        if len(plan.strategy.canaries):
            self.console.print(f"what the canaries show of ε: cloister audit {directory.path}")
        self.console.print(f"run directory  {directory.path}")
        if (directory.path / REPORT).exists():
            self.console.print(f"report         {directory.path / REPORT}")


def contract_of_clients(privacy: PrivacyConfig) -> str:
    """Return one line on the mechanism of the clients."""
    client = privacy.client
    noise = f"{client.noise_key.removeprefix('privacy.')} {at_least(client.noise_multiplier)}"
    return f"{client.name} ({', '.join([noise, *client.bounds])})"


def render_canaries(count: int) -> str:
    """Return one line on the cost of canaries.

    Args:
        count: m, the number of canaries.
    """
    more = f"the mean is over {count / 2:g} more than the clients, and moves that much less"
    return f"secret coins let about half of them take part; {more}"


class JsonReporter(ConsoleReporter):
    """Reporter of the content of `ConsoleReporter` as JSON, with time, run and event in every line.

    If the privacy analysis relies on secret draws, the time is the day, and durations are omitted.

    Args: as `ConsoleReporter`.
    """

    run = ""
    draws = False

    def opening(self, plan: Plan, directory: RunDirectory, claim: Claim, epsilon: float | None = None) -> None:
        """Print the event `start`, with the settings that differ from their defaults.

        Args: as `ConsoleReporter.opening`.
        """
        self.begin(plan)
        self.run = directory.path.name
        facts: dict[str, object] = {"privacy": claim.mechanism, "status": claim.status, "epsilon": epsilon}
        facts |= {"premises": to_json(claim.premises), "majority": self.majority}
        settings = changed(shown(plan.config.flat()))
        self._say("start", directory=str(directory.path), rounds=self.rounds, settings=settings, **facts)

    def note(self, text: str) -> None:
        """Print the event `note`."""
        self._say("note", text=text)

    def __call__(self, done: Round, _: object) -> None:
        """Print the event `round`, and `rejected` for each reply that did not count."""
        self.last = done
        measured = done.measured
        facts: dict[str, object] = {"scores": dict(done.central or done.federated)}
        if measured is not None:
            facts |= {"noise-std": measured.noise_std, "epsilon": measured.epsilon, "abandoned": measured.abandoned}
            if not self.hides_times:
                facts["seconds"] = done.seconds["total"]
            if not self.secret_cohorts:
                facts |= {"accepted": measured.accepted, "asked": measured.asked}
        self._say("round", round=done.number, **facts)
        rejected = measured.rejected if measured and not self.secret_cohorts else ()
        for item in (*rejected, *done.unscored):
            who = {"node": str(item.node_id)} | ({"site": item.site} if item.site else {})
            self._say("rejected", round=done.number, **who, code=item.code, detail=item.detail)

    def closing(
        self,
        plan: Plan,
        directory: RunDirectory,
        statement: Statement,
        ending: Ending,
        kept: Round | None,
        seconds: float,
    ) -> None:
        """Print the event `end`, with the kept model's scores and the statement.

        Args: as `ConsoleReporter.closing`.
        """
        facts: dict[str, object] = {"ended": ending.how, "stopped": ending.why}
        if kept is not None:
            facts |= {"kept": kept.number, "scores": dict(kept.central or kept.federated)}
        if not self.hides_times:
            facts["seconds"] = round(seconds, 1)
        self._say(
            "end", rounds=self.last.number if self.last else 0, **facts, privacy=record(statement) | ending.facts()
        )

    def _say(self, event: str, **facts: object) -> None:
        form = "%Y-%m-%d" if self.hides_times else "%Y-%m-%dT%H:%M:%SZ"
        moment = time.strftime(form, time.gmtime(published(time.time(), self.hides_times)))
        line = {"time": moment, "run": self.run, "event": event, **facts}
        self.console.print(json.dumps(line, ensure_ascii=False), soft_wrap=True)
