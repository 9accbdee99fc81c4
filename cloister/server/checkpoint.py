"""State of a run after a round, written as one unit, and the resumption of an interrupted run from it.

    checkpoints/round-00003.npz     the global model
    state-00003.npz                 moments, roles, draws, the best model …; absent without such state
    state.json                      written last: the number of the round to resume after

Each file is written completely or absent. The files of the previous round stay until `state.json` names the new one.
So one complete round survives a process that dies at any time. Arrays are read without pickle.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from cloister.config.io import Scalar
from cloister.config.renamed import translated
from cloister.config.run import RunConfig, parse
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.build import Plan
from cloister.server.client_claims import Attested
from cloister.server.ledger_location import is_simulated
from cloister.server.reports.rundir import NAME, RESUMED, SEEN, SIMULATION, RunDirectory
from cloister.server.stopping import EarlyStopping
from cloister.utils.arrays import Layout, State, Stateful, from_record, joined, part
from cloister.utils.errors import ConfigError
from cloister.utils.files import read_npz, write_npz
from cloister.utils.wire import ASSUMED, ASSUMED_ROUNDS, HELD_OUT

VERSION = 1
FILE = "state.json"
MAY_CHANGE = frozenset(
    {
        *("num-rounds", "resume", "round-timeout", "late-timeout", "node-timeout"),
        *("keep-checkpoints", "tensorboard", "report", "log-format"),
    }
)
"""Keys whose values may change on resume; `ResumedRun.refuse_more_rounds` checks additional rounds."""
NODES = "nodes.json"
Split = Callable[[list[int]], tuple[list[int], list[int]]]
LEDGER = "ledger.json"
"""File with the place of a run's ledger, since a relative path in the settings depends on the working directory."""


@dataclass(frozen=True)
class Progress:
    """State of a run after a round.

    Attributes:
        round: number of the last finished round; 0: the initial model.
        model: the global model after it.
        state: the joined state of all stateful objects.
    """

    round: int
    model: Mapping[str, NDArray]
    state: State

    @classmethod
    def of(cls, number: int, arrays: ArrayRecord, stateful: Mapping[str, Stateful]) -> "Progress":
        """Return the present state of a run.

        Args:
            number: of the round that is finished.
            arrays: its global model.
            stateful: the objects that keep state from round to round, by name.
        """
        state = joined({name: one.state_dict() for name, one in stateful.items()})
        return cls(number, from_record(arrays), state)

    def save(self, directory: RunDirectory, keep: int) -> None:
        """Write the state, so that the run would resume after this round.

        The checkpoint must already be written.

        Args:
            directory: of the run.
            keep: number of newest checkpoints to retain; 0: all.
        """
        if self.state:
            write_npz(_arrays_path(directory, self.round), self.state)
        directory.write_json(FILE, {"version": VERSION, "round": self.round, "arrays": bool(self.state)})
        for old in directory.path.glob("state-*.npz"):
            if old != _arrays_path(directory, self.round):
                old.unlink()
        directory.prune(keep)

    @classmethod
    def load(cls, directory: RunDirectory) -> "Progress | None":
        """Return the saved state of a run directory; None if nothing was saved.

        Raises:
            ConfigError: a file differs from the format that `save` writes.
        """
        path = directory.path / FILE
        try:
            facts = json.loads(path.read_text())
            if facts["version"] != VERSION:
                raise ConfigError(
                    f"{path} has version {facts['version']!r}, and this Cloister reads {VERSION}; resume the run with "
                    "the Cloister that began it"
                )
            number = int(facts["round"])
            if number < 0:
                raise ValueError(f"round {number}")
            model = read_npz(directory.checkpoint_path(number))
            return cls(number, model, read_npz(_arrays_path(directory, number)) if facts["arrays"] else {})
        except FileNotFoundError as error:
            if error.filename != str(path):
                raise ConfigError(f"resume: {error.filename} is missing, and {path} goes with it") from None
            return None
        except ConfigError:
            raise
        except Exception as error:  # readers of archives raise exceptions without a common base
            raise ConfigError(f"resume: {path} and its checkpoint cannot be read: {type(error).__name__}") from None

    def restore(self, stateful: Mapping[str, Stateful]) -> None:
        """Restore the state of every stateful object.

        Args:
            stateful: under the names that `of` received.

        Raises:
            ConfigError: the saved state does not fit an object.
            LedgerError: the ledger lacks releases of the run.
        """
        for name, one in stateful.items():
            try:
                one.load_state_dict(part(self.state, name))
            except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
                raise ConfigError(
                    f"resume: what was saved of the run's {name} does not fit ({type(error).__name__}); if another "
                    "version of Cloister or of a plugin wrote it, finish it with that version"
                ) from None


def stateful_objects(plan: Plan, stopping: EarlyStopping, attested: Attested) -> dict[str, Stateful]:
    """Return the stateful objects of a run on the server, by name.

    Args:
        plan: of the run.
        stopping: of its loop.
        attested: counts the mechanisms that nodes state.
    """
    roles: dict[str, Stateful] = {} if plan.held_out is None else {"roles": plan.held_out}
    return {"strategy": plan.strategy, "budget": plan.budget, "stopping": stopping, "attested": attested, **roles}


def _arrays_path(directory: RunDirectory, number: int) -> Path:
    return directory.path / f"state-{number:05d}.npz"


@runtime_checkable
class StatefulGrid(Protocol):
    """Grid whose nodes end with this process, so that the run stores their state."""

    def memories(self) -> dict[str, Any]:
        """Return the state of the nodes, for JSON."""

    def remember(self, memories: Mapping[str, Any]) -> None:
        """Restore the state of the nodes."""


@dataclass(frozen=True)
class ResumedRun:
    """Interrupted run, as read from its directory.

    Attributes:
        directory: of the run; this process holds its lock.
        config: of its last execution.
        seed: in force.
        resumed_after: the rounds after which it was resumed earlier.
        progress: the saved state; None: the run was interrupted before it began.
        draws_are_seen: whether nodes may have learned who was drawn. Then no draw of the run amplifies, to its end.
    """

    directory: RunDirectory
    config: RunConfig
    seed: int
    resumed_after: tuple[int, ...]
    progress: Progress | None
    draws_are_seen: bool = False

    @property
    def resumes(self) -> int:
        """Return the number of resumes, including this one."""
        return len(self.resumed_after) + (self.progress is not None)

    @property
    def last_round(self) -> int:
        """Return the last finished round; -1: none, not even the initial model."""
        return -1 if self.progress is None else self.progress.round

    def refuse_layout(self, layout: Layout) -> None:
        """Raise ConfigError if the task's model differs from the trained one."""
        if self.progress is None or (found := Layout.of(self.progress.model)) == layout:
            return
        now, then = _arrays(layout), _arrays(found)
        name = next((name for name in (*then, *now) if now.get(name) != then.get(name)), "")
        raise ConfigError(
            f"resume: array {name!r} of the model is {now.get(name, 'none')}, and was {then.get(name, 'none')} in "
            f"{self.directory.path}; a run goes on with the model that it began with"
        )

    def refuse_more_rounds(self, config: RunConfig, counts_rounds: bool) -> None:
        """Refuse more rounds than a claim or a calibration covers.

        Args:
            config: of the resumed run.
            counts_rounds: whether a claim depends on their number.

        Raises:
            ConfigError: the number of rounds exceeds the original one.
        """
        if counts_rounds and config.num_rounds > self.config.num_rounds:
            raise ConfigError(
                f"num-rounds = {config.num_rounds} contradicts the claim of the run that is resumed, which had "
                f"{self.config.num_rounds}: how many rounds there are must not follow from what was released; use "
                f"{self.config.num_rounds}"
            )


def _arrays(layout: Layout) -> dict[str, str]:
    described = zip(layout.names, layout.dtypes, layout.shapes, strict=True)
    return {name: f"{dtype} of shape {shape}" for name, dtype, shape in described}


@contextmanager
def earlier_run(config: RunConfig, grid: Grid, clients: int = 0) -> Iterator[ResumedRun]:
    """Hold the lock of the run that `resume` names within the block.

    Args:
        config: of the resumed run.
        grid: to the clients.
        clients: number of clients that this process simulates; 0: none.

    Raises:
        ConfigError: the run is absent, has ended, is held by a process, or cannot resume with this configuration.
    """
    path = Path(config.resume).expanduser().resolve()
    _read(path / "config.json", path)  # before creating files there
    with RunDirectory(path).held() as directory:
        # Read again: the previous holder of the lock may have resumed the run.
        before, seed, resumed_after, seen = _facts(directory)
        old, new = before.flat(), config.flat()
        lines = [
            f"{key} = {new.get(key, 'none')!r} differs from {old.get(key, 'none')!r}, with which the run began that is "
            f"resumed; use {old.get(key, 'none')!r}, or begin a new run"
            for key in sorted(old.keys() | new.keys())
            if key not in MAY_CHANGE and old.get(key) != new.get(key)
        ]
        if config.num_rounds < before.num_rounds:
            lines.append(
                f"num-rounds = {config.num_rounds} is fewer than the {before.num_rounds} of the run that is resumed; "
                f"use {before.num_rounds} or more"
            )
        if lines:
            raise ConfigError("\n".join(lines))
        if (then := clients_of(path)) != clients:  # their number determines the data's partition
            way = "none is simulated in one process" if then == 0 else f"cloister run --clients {then}"
            raise ConfigError(f"clients = {clients} differs from {then}, with which the run began in {path}; use {way}")
        if config.privacy.noise_seed != -1:
            raise ConfigError(
                f"resume: privacy.noise-seed = {config.privacy.noise_seed} would add the noise of the first rounds "
                "once more, and noise that repeats can be subtracted; only runs with -1 go on"
            )
        counts = config.privacy.client.is_on or (config.evaluation.held_out_clients and config.is_private)
        if counts and is_simulated(grid) and not isinstance(grid, StatefulGrid):  # their state ended with their process
            raise ConfigError(
                f"resume: with privacy.client = {config.privacy.client.name!r} and evaluation.held-out-clients = "
                f"{config.evaluation.held_out_clients:g} nodes remember what they have released or scored, and those "
                "of Flower's simulation have ended; simulate with cloister run"
            )
        progress = Progress.load(directory)
        _refuse_ended(path, config, progress)
        yield ResumedRun(directory, before, seed, resumed_after, progress, seen)


def remember(grid: Grid, earlier: ResumedRun, split: Split | None, secret: bool) -> None:
    """Restore the state of this process's nodes from the run directory.

    Args:
        grid: to them; nodes of any other grid keep their state themselves.
        earlier: the run.
        split: divides nodes into those that train and those that never do, by the roles of the run; None: all train.
        secret: whether cohorts are secret. Then the files of a killed process are removed. Without such files, every
            node counts as if it had trained in all earlier rounds.

    Raises:
        ConfigError: the saved state is damaged.
    """
    if not isinstance(grid, StatefulGrid):
        return
    directory = earlier.directory
    try:
        memories = directory.read_json(NODES)
        if secret and not memories and earlier.progress is not None:
            # Every node that trains may have done so in each earlier round.
            nodes, rounds = list(grid.get_node_ids()), earlier.progress.round + earlier.resumes
            outsiders = split(nodes)[1] if split else []
            assumed = {node: {ASSUMED_ROUNDS: rounds, HELD_OUT: node in outsiders} for node in nodes}
            memories = {str(node): {"config": {ASSUMED: facts}, "metrics": {}} for node, facts in assumed.items()}
        grid.remember(memories)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _foreign(directory.path / NODES, error) from None
    if secret:
        forget_nodes(directory)


def forget_nodes(directory: RunDirectory) -> None:
    """Remove the files that reveal how often each in-process node was drawn.

    An error of the disk is ignored.

    Args:
        directory: of the run.
    """
    for path in (directory.path / NODES, *directory.path.glob(f".{Path(NODES).stem}.*.partial.json")):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def refuse_other_ledger(directory: RunDirectory, ledger: Ledger) -> None:
    """Refuse to resume with another ledger than the original one.

    Args:
        directory: of the run.
        ledger: determined by the settings.

    Raises:
        ConfigError: its place differs, or it lacks lines. Its budget and releases would then not be counted.
    """
    try:
        noted = directory.read_json(LEDGER)
        place, head = (noted["path"], noted["head"]) if noted else (_place(directory, ledger), ledger.head)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _foreign(directory.path / LEDGER, error) from None
    if (found := _place(directory, ledger)) != place:
        raise ConfigError(
            f"resume: the ledger would be {found}, and was {place} when the run began in {directory.path}; resume it "
            "from the working directory in which it began, with its ledger where it was"
        )
    if head not in ledger.heads():
        raise ConfigError(
            f"resume: {ledger.path} lacks lines that were in it when the run began in {directory.path}; put that "
            "ledger back, or begin a new run"
        )


def note_ledger(directory: RunDirectory, ledger: Ledger) -> None:
    """Record the ledger of a run, before any release.

    Args:
        directory: of the run.
        ledger: of the run, with its budget.
    """
    ledger.sync()  # a recorded line that a power failure removes would block every resume
    directory.write_json(LEDGER, {"path": _place(directory, ledger), "head": ledger.head})


def _place(directory: RunDirectory, ledger: Ledger) -> str:
    """Return the absolute path of a ledger.

    For a ledger in the run directory, the path is relative to that directory.
    """
    inside = ledger.path.is_relative_to(directory.path)
    return str(ledger.path.relative_to(directory.path) if inside else ledger.path)


def settings_of(directory: Path) -> dict[str, Scalar]:
    """Return the settings to resume a run, with its directory as `resume`.

    Args:
        directory: of the run.

    Raises:
        ConfigError: the directory contains no run.
    """
    path = directory.expanduser().resolve()
    config, *_ = _facts(RunDirectory(path))
    return config.flat() | {"resume": str(path)}


def clients_of(directory: Path) -> int:
    """Return the number of clients that a run simulated in its process; 0: none.

    Args:
        directory: of the run.
    """
    path = directory.expanduser().resolve() / SIMULATION
    try:
        return int(_read(path, path.parent)["clients"]) if path.is_file() else 0
    except (ValueError, KeyError, TypeError) as error:
        raise _foreign(path, error) from None


def _facts(directory: RunDirectory) -> tuple[RunConfig, int, tuple[int, ...], bool]:
    """Return a run's configuration, seed, resumes, and whether nodes may learn its draws; set its ledger name."""
    path = directory.path / "config.json"
    facts = _read(path, directory.path)
    try:
        directory.name = str(facts.get(NAME, directory.name))
        resumed_after = tuple(map(int, facts.get(RESUMED, ())))
        return parse(translated(facts["config"])), int(facts["seed"]), resumed_after, bool(facts.get(SEEN, False))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _foreign(path, error) from None


def _foreign(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"resume: {path} is not what a run writes: {type(error).__name__}")


def _read(file: Path, directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"resume = {str(directory)!r} is no run directory: {file.name}: {type(error).__name__}"
        ) from None


def _refuse_ended(path: Path, config: RunConfig, progress: Progress | None) -> None:
    """Refuse a run that ended after all rounds or by early stopping."""
    try:
        ended = json.loads((path / "privacy.json").read_text())["ended"]
        how, why = ended["how"], ended["why"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    finished = progress is not None and progress.round >= config.num_rounds
    if how == "as-asked" and (finished or why):
        raise ConfigError(
            f"resume = {config.resume!r} has nothing to resume: the run ended in order "
            f"({why or f'after all {config.num_rounds} rounds'})"
        )
