"""What a person sees of a run: a contract at the start, a line a round, a table at the end."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from cloister.core.config import PrivacyConfig
from cloister.privacy.claim import Claim, in_words
from cloister.server.build import Plan
from cloister.server.clients import clients_in_words
from cloister.server.lasting import ledger_in_words
from cloister.server.loop import Round
from cloister.server.rundir import RunDirectory

WIDTH = 110


class Narrator:
    """Prints a run, to a terminal or to a log.

    Args:
        rounds: how many there will be.
        console: by default, standard output.
    """

    def __init__(self, rounds: int, console: Console | None = None) -> None:
        self.rounds = rounds
        self.console = console or Console(width=WIDTH, highlight=False, soft_wrap=True, markup=False)
        self.last: Round | None = None
        self.secret_cohorts = False

    def opening(self, plan: Plan, directory: RunDirectory) -> None:
        """Name the run, and say in one line what is promised."""
        config = plan.config
        # Amplification rests on nobody knowing who was drawn, nor how many.
        self.secret_cohorts = plan.strategy.has_secret_cohorts
        self.console.print(f"Cloister  {config.task.name}, {config.strategy.name}, {config.num_rounds} rounds")
        self.console.print(f"run directory  {directory.path}")
        self.console.print(f"privacy        {contract(plan.claim)}")
        if config.privacy.client != "none":
            self.console.print(f"on clients     {contract_of_clients(config.privacy)}")
        for reason in plan.claim.reasons:
            self.console.print(f"               because {reason}")

    def __call__(self, done: Round, _: object) -> None:
        """One line for a finished round."""
        self.last = done
        parts = [f"round {done.number:>3}/{self.rounds}", *(_figures(done.central or done.federated))]
        if done.measured is not None:
            if done.measured.noise_std is not None:
                parts.append(f"noise std {done.measured.noise_std:.2e}")
            if done.measured.epsilon is not None:
                parts.append(f"ε {done.measured.epsilon:.3g}")
            if not self.secret_cohorts:
                parts.append(f"replies {done.measured.accepted}/{done.measured.asked}")
            if done.measured.abandoned:
                parts.append("abandoned")
            parts.append(f"{done.seconds['total']:.1f} s")
        self.console.print("  ".join(parts))
        rejected = done.measured.rejected if done.measured and not self.secret_cohorts else ()
        for item in (*rejected, *done.unscored):
            self.console.print(
                f"           rejected: round {done.number}, node {item.node_id}, {item.code}: {item.detail}"
            )

    def closing(
        self, plan: Plan, directory: RunDirectory, privacy: dict[str, Any], stopped: str, seconds: float
    ) -> None:
        """Why the run stopped, if it did; the table; what may be said about privacy."""
        if stopped:
            self.console.print(stopped)
        table = Table(title="Result", show_header=False, title_justify="left", min_width=60)
        for name, value in _rows(self.last, plan, seconds):
            table.add_row(name, value)
        self.console.print(table)
        for line in (*in_words(privacy), *clients_in_words(privacy), *ledger_in_words(plan, directory.path)):
            self.console.print(line)
        self.console.print(f"run directory  {directory.path}")


def contract(claim: Claim) -> str:
    """What is promised, in one line."""
    if claim.mechanism == "none":
        return "none on the server, which sees what every client sends"
    named = [(key.removeprefix("privacy."), value) for key, value in list(claim.parameters.items())[:3]]
    settings = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in named)
    promise = f"; unit: {claim.unit}, {claim.relation}" if claim.status == "sound" else ""
    return f"{claim.mechanism} ({settings}); {claim.status}{promise}"


def contract_of_clients(privacy: PrivacyConfig) -> str:
    """What the clients do to what they send, in one line."""
    noise = f"{privacy.client} (client-noise-multiplier {privacy.client_noise_multiplier:.4g}"
    if privacy.client == "laplace":
        return f"{noise}, radius {privacy.radius:.4g})" if privacy.radius else f"{noise}, radius of the update)"
    return f"{noise}, client-clipping-norm {privacy.client_clipping_norm:.4g}, {privacy.batch_sampling} batches)"


def _rows(last: Round | None, plan: Plan, seconds: float) -> list[tuple[str, str]]:
    rows = [(name, f"{value:.4f}") for name, value in (last.central if last else {}).items()]
    rows += [(f"{name} (on clients)", f"{value:.4f}") for name, value in (last.federated if last else {}).items()]
    measured = last.measured if last else None
    rows.append(
        ("privacy", plan.claim.mechanism + ("" if plan.claim.mechanism == "none" else f" ({plan.claim.status})"))
    )
    if plan.config.privacy.client != "none":
        rows.append(("on clients", plan.config.privacy.client))
    if measured and measured.noise_std is not None:
        rows.append(("noise std on a weight, last round", f"{measured.noise_std:.3e}"))
        nominal = "" if plan.claim.status == "sound" else "nominal "
        rows.append((f"{nominal}noise multiplier, last round", f"{measured.noise_multiplier:.4g}"))
    rows.append(("rounds", str(last.number if last else 0)))
    rows.append(("seconds", f"{seconds:.1f}"))
    return rows


def _figures(scores: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in scores.items()]
