"""Audit of a finished run: the run's directory, the table of audits, their progress and order."""

import json
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Protocol, cast

from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from cloister.audits.findings import Audited, Finding, Skipped, earlier
from cloister.config.renamed import translated
from cloister.config.run import RunConfig, parse
from cloister.tasks.base import Model, Task
from cloister.tasks.making import model_of, named_task
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.files import Json, read_json, read_npz
from cloister.utils.registry import Registry
from cloister.utils.terminal import can_redraw, format_duration


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, as its directory describes it.

    Attributes:
        path: of the directory.
        config: of the run.
        seed: effective seed, of the partition of examples and of the initial model.
        privacy: the content of `privacy.json`.
        clients: number of simulated clients; 0: they were nodes, whose data is not available.
    """

    path: Path
    config: RunConfig
    seed: int
    privacy: Json
    clients: int

    @classmethod
    def read(cls, path: Path) -> "FinishedRun":
        """Read a run directory.

        Raises:
            ConfigError: it is no run directory, or its run has not ended.
        """
        facts, privacy = read_json(path / "config.json"), read_json(path / "privacy.json")
        if privacy.get("status") == "running":
            raise ConfigError(f"{path}: this run has not ended; audit it when it has (cloister status --runs {path})")
        if "status" not in privacy:
            raise ConfigError(f"{path / 'privacy.json'} is not what a run writes: it has no status")
        try:
            config, seed = parse(translated(facts["config"])), int(facts["seed"])
        except ConfigError as error:
            raise ConfigError(f"{path / 'config.json'}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{path} is no run directory: its config.json is not that of a run") from None
        file = path / "simulation.json"
        clients = read_json(file).get("clients") if file.is_file() else 0
        if type(clients) is not int or clients < 0:
            raise ConfigError(f"{file} is not what a run writes: clients must be a whole number")
        return cls(path, config, seed, privacy, clients)

    @cached_property
    def task(self) -> Task:
        """Learning problem of the run."""
        return named_task(self.config.task)

    @property
    def delta(self) -> float:
        """δ at which the run's claims are stated."""
        return self.config.privacy.target_delta

    @property
    def without_examples(self) -> str:
        """Return the reason why attacks on examples are impossible; empty if they are possible."""
        if not self.clients:
            return "its clients were nodes with data of their own, which is not here (no simulation.json)"
        if self.config.privacy.server.hypotheses:
            return "it trains several hypotheses, and this attack is about one model"
        if self.config.privacy.server.canaries:
            return "canaries take part in its releases, and runs of the attacker's own would have others"
        if self.config.strategy.pretrain_epochs:
            return (
                "its first model was trained on the server's examples, which runs of the attacker's own do not repeat"
            )
        if self.config.evaluation.held_out_clients:
            return "some of its clients train nothing, and which ones was drawn at random"
        return ""

    @property
    def seconds_a_round(self) -> float | None:
        """Return the median duration of a round without evaluation.

        It is None if it was not recorded.

        The first round builds the network, and is excluded. Durations that would reveal a draw are not recorded.
        """
        path = self.path / "rounds.jsonl"
        try:
            rounds = [line for line in map(json.loads, path.read_text().splitlines()) if line["round"]]
            return median(line["seconds"]["total"] - line["seconds"].get("evaluate", 0.0) for line in rounds)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None

    def model(self) -> Model:
        """Load the final model of the run.

        Raises:
            DataError: there is none, or there are several hypotheses.
        """
        model = model_of(self.task)
        path = self.path / f"model{model.suffix}"
        if not path.is_file():
            raise DataError(f"{self.path} holds no model{model.suffix}: the run ended without one model for everybody")
        model.load(path)
        return model

    @property
    def has_model(self) -> bool:
        """Return True if the run saved a final model for all clients."""
        return any(self.path.glob("model.*"))

    def released(self) -> dict[int, dict[str, NDArray]]:
        """Load the saved checkpoints: the model after each round, by its number.

        Number 0 is the initial model.
        """
        found = {int(path.stem.removeprefix("round-")): path for path in self.path.glob("checkpoints/round-*.npz")}
        models = {}
        for number, path in sorted(found.items()):
            try:
                models[number] = read_npz(path)
            except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
                raise DataError(f"{path} holds no model: an .npz file of its weights was expected") from None
        return models


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
        self._draws = console is not None and can_redraw(console)
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
        about = "how long they take is seen at the first" if each is None else f"about {format_duration(amount * each)}"
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
        return f"{self._done:g} of {self._amount:g}" + ("" if left is None else f", about {format_duration(left)} left")

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text)


OF_SHADOWS = "rounds of the attacker's own federations"
"""Unit of progress for audits that run federations."""
FEWEST = 4
"""Fewest shadow runs for an attack."""


@dataclass(frozen=True)
class Effort:
    """Limits of an audit's work.

    Attributes:
        shadows: number of the attacker's own runs that an attack learns from.
        seed: of the attacker's draws: absent units of a shadow run, start of an optimization. Never of noise.
        progress: receives the planned and the completed work of the audit.
    """

    shadows: int = 16
    seed: int = 0
    progress: Progress = field(default_factory=Progress, compare=False)

    def __post_init__(self) -> None:
        if self.shadows < FEWEST:
            raise ConfigError(f"shadows must be at least {FEWEST}, got {self.shadows}")


class Audit(Protocol):
    """An attack with its controls, for runs that it fits.

    Attributes:
        name: as in the table.
    """

    name: str

    def misfit(self, run: FinishedRun) -> str:
        """Return the reason why this audit does not apply to a run; empty if it does."""

    def conduct(self, run: FinishedRun, effort: Effort) -> Finding:
        """Attack the run, and the controls.

        Args:
            run: a fitting run. Pictures are written into its directory.
            effort: limits of the work.
        """


AUDITS = Registry(
    "audit",
    "cloister.audits",
    {
        "canaries": "cloister.audits.canaries:AUDIT",
        "client-inference": "cloister.audits.client_inference:AUDIT",
        "gradient-inversion": "cloister.audits.gradient_inversion:AUDIT",
        "membership-inference": "cloister.audits.membership:AUDIT",
    },
)
"""Every audit, built in or from another package: "module:object", where the object is an `Audit`."""


def audit(path: Path, effort: Effort, only: Sequence[str] = ()) -> Audited:
    """Run every fitting audit of a run, and write `audit.json` after each of them.

    Earlier findings of audits that do not run this time are kept.

    Args:
        path: of the run directory.
        effort: limits of the audits.
        only: names of audits; empty: all of them.

    Raises:
        ConfigError: the path is no run directory, its run has not ended, or its `audit.json` is malformed.
        PluginError: an audit is unknown.
        DataError: the data of the run's task is not on this machine.
    """
    run = FinishedRun.read(path)
    if not run.config.privacy.server.hypotheses and run.has_model:
        run.model()  # raises for a broken model before the first attack
    found = {finding.name: finding for finding in earlier(run.path, run.privacy)}
    chosen = only or AUDITS.names()
    others = [name for name in AUDITS.names() if name not in (*chosen, *found)]
    skipped = [Skipped(name, "it was not asked for") for name in others]
    for one in [cast(Audit, AUDITS.load(name)) for name in chosen]:
        if why := one.misfit(run):
            skipped.append(Skipped(one.name, why))
            continue
        with effort.progress.audit(one.name):
            made = one.conduct(run, effort)
        found[one.name] = replace(made, seconds=effort.progress.seconds)
        Audited(run.path, run.privacy, tuple(found.values()), tuple(skipped)).write()
    audited = Audited(run.path, run.privacy, tuple(found.values()), tuple(skipped))
    audited.write()
    return audited
