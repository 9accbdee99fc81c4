"""Seeded schedules of faults for whole runs: `python tests/faults/schedules.py FIRST COUNT`.

`python tests/faults/schedules.py everywhere KIND` lets each fault happen once at each effect of a run of a kind.

The server is the real one, from `run` down to the ledger, the checkpoints and `resume`. Its grid, its clock and its
disk are virtual. A run that dies is resumed, until it comes to its end; what must hold is checked whenever a model
leaves, whenever noise is drawn, and after every death.
"""

import functools
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import pytest
from virtual_disk import FAULTS, Disk, Killed
from virtual_grid import HARMFUL, HARMLESS, Clock, VirtualGrid, model_bytes

from cloister.config.run import RunConfig, parse
from cloister.privacy.accounting import accountants
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.mechanisms import gaussian
from cloister.server import checkpoint, polling_grid
from cloister.server import run as running
from cloister.server.checkpoint import Progress, settings_of
from cloister.server.polling_grid import PollingGrid
from cloister.server.reports import rundir
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.html.data import Facts
from cloister.server.reports.rundir import RunDirectory
from cloister.server.reports.status import run_state
from cloister.server.run import run
from cloister.server.strategy_wrapper import StrategyWrapper
from cloister.strategies import averaging
from cloister.utils.errors import CloisterError

NODES = 3
ROUNDS = 2
TIMEOUT = 2.0
"""Virtual seconds of a round, of a late node, and of a pause."""
BOUND = 3 * TIMEOUT * (ROUNDS + 1)
"""Virtual seconds that a process of a run may take: each round waits for nodes, and then for replies."""
EFFECTS = 320
"""Of an undisturbed run, at most: where faults are put."""
LIVES = 6
"""After so many deaths the disk is left alone, so that a run comes to its end."""
MAX_EPSILON = 5.0
MODELS = ("round-", "model")

PLAIN: dict[str, str | int | float | bool] = {
    "task.name": "linear",
    "task.test-fraction": 0.0,
    "strategy.name": "fedadam",
    "strategy.quorum": 2,
    "evaluation.central": False,
    "privacy.server": "none",
    "num-rounds": ROUNDS,
    "round-timeout": TIMEOUT,
    "late-timeout": TIMEOUT,
    "node-timeout": TIMEOUT,
    "tensorboard": False,
    "report": False,
    "run-name": "r",
    "seed": 1,
}
PRIVATE = PLAIN | {
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 1.7,
    "privacy.max-epsilon": MAX_EPSILON,  # for three releases: one may be lost
    "privacy.data-identity": "d",
}
ADAPTIVE = PRIVATE | {"privacy.clipping": "adaptive", "strategy.name": "fedavgm"}
SECRET = PRIVATE | {"strategy.sampling": "poisson", "strategy.fraction-train": 0.6}
KINDS = {"plain": PLAIN, "private": PRIVATE, "adaptive": ADAPTIVE, "secret": SECRET}
NOTHING: Mapping[int, str] = {}
EPSILONS: dict[tuple[Event, ...], float] = {}
"""Of releases that were looked at before."""
FOR_GOOD = ("as-asked", "budget")
"""Endings after which there is nothing to resume."""


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True)
class Schedule:
    """Events that a seed decides.

    Attributes:
        seed: of everything.
        kind: of the run.
        faults: that messages may meet.
        disk: for each life of the server, faults by the number of the effect.
    """

    seed: int
    kind: str
    faults: tuple[str, ...]
    disk: tuple[Mapping[int, str], ...]

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        """The schedule of a seed; in every second no reply is lost."""
        rng = random.Random(seed)
        (kind,) = rng.choices(tuple(KINDS), (3, 3, 3, 1))  # the last one takes longest
        faults = HARMLESS if seed % 2 else HARMLESS + HARMFUL
        lives = rng.randint(0, LIVES)
        return cls(seed, kind, faults, tuple(cls._of_a_life(rng) for _ in range(lives)))

    @staticmethod
    def _of_a_life(rng: random.Random) -> dict[int, str]:
        return {rng.randint(1, EFFECTS): rng.choice(FAULTS) for _ in range(rng.choice((1, 1, 2)))}


def everywhere(kind: str, faults: tuple[str, ...] = FAULTS) -> Iterator[Schedule]:
    """A schedule for each fault at each effect of a run: one, and nothing else happens."""
    with cheap(), tempfile.TemporaryDirectory(dir=memory()) as folder:
        whole = Simulation(Path(folder), kind)
        whole.live()
    for effect in range(1, whole.disk.effects + 1):
        yield from (Schedule(effect, kind, ("quick",), ({effect: fault},)) for fault in faults)


class Silent(ConsoleReporter):
    """Says nothing, and costs nothing."""

    def opening(self, *_: object, **__: object) -> None:
        pass

    def live(self, *_: object):
        return nullcontext()

    def note(self, _: str) -> None:
        pass

    def __call__(self, *_: object) -> None:
        pass

    def closing(self, *_: object, **__: object) -> None:
        pass


@dataclass
class Simulation:
    """One run under faults, from its first process to its last.

    Args:
        folder: of its own, empty.
        kind: of the run.
        seed: of what happens beside the disk.
        faults: that messages may meet.
    """

    folder: Path
    kind: str
    seed: int = 0
    faults: tuple[str, ...] = ("quick",)
    lost: bool = False
    lives: int = 0
    left: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    drawn: Counter[int] = field(default_factory=Counter)
    tried: Counter[int] = field(default_factory=Counter)
    recorded: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.disk = Disk(self.folder / "runs", self.rng)
        self.settings = KINDS[self.kind] | {"output-dir": str(self.folder / "runs")}
        self.directory = self.folder / "runs" / "r"
        self.round = 0
        (self.folder / "runs").mkdir(parents=True)

    # --- what happens ---

    def live(self, disk_faults: Mapping[int, str] = NOTHING) -> None:
        """One process of the server, from its start to its end, and a look at what it leaves."""
        self.lives += 1
        clock = Clock(BOUND)
        grid = VirtualGrid(NODES, clock, self.rng, self.faults, 0.3, TIMEOUT, self.disk.effect, self._has_left)
        with self.disk.watched(disk_faults), self._instrumented(clock), suppress(Killed, CloisterError, OSError):
            config = _parsed(self._settings())
            late = config.late_timeout if config.is_private else None
            run(PollingGrid(grid, late), config, Silent(ROUNDS))
        self.disk.reboot()
        self.lost |= grid.lost
        self.check()

    def _settings(self) -> Mapping[str, str | int | float | bool]:
        """Of the run that there is; of a new one in the place of one that had not even said what it is."""
        if (self.directory / "config.json").exists():
            return settings_of(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)
        return self.settings

    def to_the_end(self) -> None:
        """Resume until there is nothing to resume."""
        while not self.is_over:
            if self.lives > 4 * LIVES:
                raise Broken("the run does not come to its end")
            self.live()
        self.check_end()

    @contextmanager
    def _instrumented(self, clock: Clock) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(polling_grid, "time", clock)
            patch.setattr(averaging, "time", clock)
            patch.setattr(Ledger, "open_all", self._noted(Ledger.open_all))
            patch.setattr(StrategyWrapper, "aggregate_train", self._counted(StrategyWrapper.aggregate_train))
            for name in ("noisy_mean", "noisy_total"):
                patch.setattr(gaussian, name, self._watched(getattr(gaussian, name)))
            yield

    def _watched(self, make):
        """Noise may be drawn for what is recorded."""

        def watched(*arguments):
            self.drawn[self.round] += 1
            self._demand_recorded(self.round, self.drawn[self.round], "drawn")
            return make(*arguments)

        return watched

    def _noted(self, record):
        """Note a record once this returns; a line that was written and never synced is not recorded."""

        def noted(ledger, *arguments, **options):
            releases = record(ledger, *arguments, **options)
            self.recorded.update(releases)
            return releases

        return noted

    def _counted(self, aggregate):
        """Note the round that is aggregated, and its number of attempts."""

        def counted(strategy, number, replies):
            self.round = number
            self.tried[number] += 1
            return aggregate(strategy, number, replies)

        return counted

    def _has_left(self, number: int, model: bytes) -> None:
        """A model of a round can be seen by others."""
        self.left[number].add(model)
        if number:
            self._demand_recorded(number, len(self.left[number]), "seen by others")

    # --- what must hold ---

    @property
    def is_private(self) -> bool:
        return self.kind != "plain"

    def _entries(self) -> list[dict]:
        """The releases on the disk, by a reader of its own; half a line is none."""
        path = self.folder / "runs" / "ledgers" / "d.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
        return [line for line in map(json.loads, whole) if line["kind"] == "open"]

    def _demand_recorded(self, number: int, made: int, how: str) -> None:
        if not self.is_private:
            return
        found = sum(entry["round"] == number for entry in self._entries())
        if found < made:
            raise Broken(f"round {number}: {made} releases were {how}, and the ledger has {found}")

    def check(self) -> None:
        """Check the invariants between two lives."""
        for path in self.directory.glob("checkpoints/round-*.npz"):
            self._has_left(int(path.stem[-5:]), self._model(path))
        if self.is_private:
            self._check_ledger()
        if not (self.directory / "config.json").exists():
            return
        if run_state(self.directory).state == "running":
            raise Broken("a dead process is said to run")
        if (self.directory / "privacy.json").exists():
            Facts.read(self.directory)
        Progress.load(RunDirectory(self.directory))

    def _check_ledger(self) -> None:
        now = {entry["release"] for entry in self._entries()}
        if not self.recorded <= now:
            raise Broken("the ledger has lost a release")
        for number, made in self.drawn.items():
            self._demand_recorded(number, made, "drawn")
        for number, count in Counter(entry["round"] for entry in self._entries()).items():
            if count > self.tried[number]:
                raise Broken(f"round {number} is {count} times in the ledger, and was tried {self.tried[number]} times")
        if (epsilon := self._epsilon()) > MAX_EPSILON:
            raise Broken(f"ε {epsilon:g} passes the budget of {MAX_EPSILON:g}")

    def _epsilon(self) -> float:
        """Of everything in the ledger."""
        ledger = Ledger(self.folder / "runs" / "ledgers" / "d.jsonl")
        events = tuple(entry.event for entry in ledger.entries)
        if events not in EPSILONS:
            EPSILONS[events] = PrivacyBudget(ledger, "").epsilon()
        return EPSILONS[events]

    def _model(self, path: Path) -> bytes:
        try:
            with np.load(path) as archive:
                return model_bytes(dict(archive))
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise Broken(f"{path.name} cannot be read: {error}") from None

    @property
    def ending(self) -> str:
        """Return the recorded end of the run; empty: none."""
        path = self.directory / "privacy.json"
        return json.loads(path.read_text()).get("ended", {}).get("how", "") if path.exists() else ""

    @property
    def is_over(self) -> bool:
        return self.ending in FOR_GOOD

    def check_end(self) -> None:
        """Check the invariants when there is nothing to resume."""
        state = run_state(self.directory)
        if not self.is_private and (state.how, state.round) != ("as-asked", ROUNDS):
            raise Broken(f"the run ended by {state.how} after round {state.round}")
        if self.ending == "budget" and len(self._entries()) < ROUNDS:
            raise Broken("the budget was not used")
        model = self._model(self.directory / "model.npz")
        if not self.is_private and not self.lost and model != undisturbed(self.kind):
            raise Broken("the model is not that of an undisturbed run")
        lines = [json.loads(line)["round"] for line in (self.directory / "rounds.jsonl").read_text().splitlines()]
        if lines != list(range(state.round + 1)):
            raise Broken(f"rounds.jsonl has rounds {lines}")


@functools.cache
def undisturbed(kind: str) -> bytes:
    """The model that a run ends with if nothing happens."""
    with cheap(), tempfile.TemporaryDirectory(dir=memory()) as folder:
        simulation = Simulation(Path(folder), kind)
        simulation.live()
        return simulation._model(simulation.directory / "model.npz")


def play(schedule: Schedule, folder: Path) -> Simulation:
    """Let a schedule happen.

    Raises:
        Broken: something does not hold.
        ForEver: somebody waits for ever.
    """
    simulation = Simulation(folder, schedule.kind, schedule.seed, schedule.faults)
    for faults in schedule.disk:
        if simulation.is_over:
            break
        simulation.live(faults)
    simulation.to_the_end()
    return simulation


@contextmanager
def cheap() -> Iterator[None]:
    """The block, in which what has nothing to do with faults costs no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_write_page", lambda _: None)
        patch.setattr(rundir, "_version", functools.cache(rundir._version))
        patch.setattr(rundir, "SPARE_BYTES", 1)
        patch.setattr(accountants, "gaussian_epsilon", functools.cache(accountants.gaussian_epsilon))
        patch.setattr(checkpoint, "parse", _parsed)
        yield


def _parsed(settings: Mapping[str, object]) -> RunConfig:
    return _parsed_once(tuple(sorted(settings.items())))


@functools.lru_cache(maxsize=8)
def _parsed_once(settings: tuple[tuple[str, object], ...]) -> RunConfig:
    return parse(dict(settings))


def memory() -> str | None:
    """A folder in memory, where there is one: schedules write thousands of files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def happened(schedules: Iterable[Schedule]) -> Counter[str]:
    """Let schedules happen, and count what did.

    Raises:
        Broken: something does not hold; the error's note says in which.
        ForEver: somebody waits for ever.
    """
    counted: Counter[str] = Counter()
    with cheap(), tempfile.TemporaryDirectory(dir=memory()) as place:
        for number, schedule in enumerate(schedules):
            folder = Path(place) / str(number)
            try:
                done = play(schedule, folder)
            except BaseException as error:
                error.add_note(f"{schedule}")
                raise
            counted.update(name.partition(" at ")[0] for name in done.disk.struck)
            counted.update({"schedules": 1, "processes": done.lives, done.ending: 1})
            shutil.rmtree(folder)
    return counted


def many(seeds: range) -> Counter[str]:
    """As `happened`, of the schedules of these seeds."""
    return happened(map(Schedule.of, seeds))


if __name__ == "__main__":
    if sys.argv[1] == "everywhere":
        print(dict(happened(everywhere(sys.argv[2]))))
    else:
        first, count = map(int, sys.argv[1:])
        print(dict(many(range(first, first + count))))
