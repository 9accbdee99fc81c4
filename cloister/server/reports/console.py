"""Console output of a run: settings and claim at the start, one line a round, a table at the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.serverapp import Grid
from rich.console import Console

from cloister.config.privacy import PrivacyConfig
from cloister.config.run import changed, shown
from cloister.config.settings import as_pairs
from cloister.core.digits import at_least, at_most
from cloister.core.terminal import can_show, table
from cloister.privacy.claims.claim import Claim, Statement
from cloister.privacy.claims.meaning import summary_of_clients
from cloister.privacy.claims.words import contract, render, render_resumed, summary
from cloister.server.build import Plan
from cloister.server.ending import Ending
from cloister.server.lasting import render_ledger
from cloister.server.loop import Round
from cloister.server.reports.progress import Screen
from cloister.server.reports.rundir import REPORT, RunDirectory
from cloister.server.sites import Sites
from cloister.server.watching import WatchedGrid, noop

WIDTH = 110


class Narrator:
    """Console reporter of a run, for a terminal or a log.

    Args:
        rounds: number of rounds.
        console: by default, standard output.

    Attributes:
        draws: whether to show the state of the clients, if the console is a terminal.
    """

    draws = True

    def __init__(self, rounds: int, console: Console | None = None) -> None:
        self.rounds = rounds
        self.console = console or Console(width=WIDTH, highlight=False, soft_wrap=True, markup=False)
        self.last: Round | None = None
        self.secret_cohorts = False
        self.hides_times = False
        self.screen: Screen | None = None

    def begin(self, plan: Plan) -> None:
        """Store whether to hide cohorts and durations, for secret draws."""
        self.secret_cohorts = plan.strategy.has_secret_cohorts
        self.hides_times = plan.hides_times

    def opening(self, plan: Plan, directory: RunDirectory, claim: Claim, epsilon: float | None = None) -> None:
        """Name the run, what its configuration changes of the defaults, and in one line what is promised.

        Args:
            plan: of the run.
            directory: of the run.
            claim: of the plan, with its premises as far as the grid shows them.
            epsilon: that all its rounds come to; None where nothing is promised.
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

    @contextmanager
    def live(self, grid: Grid, sites: Sites) -> Iterator[None]:
        """Show the state of the clients on a terminal within the block.

        Call this after `opening`. Nothing is shown if it would reveal the drawn cohort, its size or a duration.

        Args:
            grid: of the run.
            sites: names of its nodes.
        """
        hidden = self.secret_cohorts or self.hides_times
        if hidden or not self.draws or not isinstance(grid, WatchedGrid) or not can_show(self.console):
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
    return (
        f"{client.name} ({', '.join([f'client-noise-multiplier {at_least(client.noise_multiplier)}', *client.bounds])})"
    )


def render_canaries(count: int) -> str:
    """Return one line on the cost of canaries.

    Args:
        count: m, the number of canaries.
    """
    more = f"the mean is over {count / 2:g} more than the clients, and moves that much less"
    return f"secret coins let about half of them take part; {more}"
