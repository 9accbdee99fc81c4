"""The run directory: everything a run leaves behind, written so that a crash leaves whole files."""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from flwr.app import ArrayRecord

from cloister.config.run import RunConfig
from cloister.core.arrays import from_record
from cloister.core.errors import CloisterError, ConfigError
from cloister.core.files import atomic_path, expanded, read_json, read_text, write_npz
from cloister.server.build import Plan
from cloister.server.times import settle

RUNNING = "running"
"""A file that the process of a run holds a lock on for as long as it lives, whatever ends it."""
RESERVE = ".reserve"
RUN_NAME = re.compile(r"[\w.-]{1,200}")
NAME = "run"
"""In `config.json`: the name of the run in the ledger, which it keeps if its directory is moved."""
ROUNDS = "rounds.jsonl"
SIMULATION = "simulation.json"
BEGUN = "begun"
"""In `config.json`: when the run began, in seconds since 1970; the time of the file may be the day's."""
RESUMED = "resumed-after"
"""In `config.json`: the rounds after which the run was resumed."""
ANNOUNCED = "CLOISTER_RUN_FILE"
"""The environment's name of a file that the path of the run directory is written to."""
EVALUATION = "evaluation.json"
PARAMETERS = "parameters.json"
REPORT = "report.html"
LEDGER = "ledger.jsonl"
PRIVACY = "privacy.json"
"""Written first when a run begins, and last when it ends."""
RESUMABLE = ("operator", "too-few-nodes", "disk", "no-replies", "error")
"""In `privacy.json`, how a run ended that had rounds left, and may be resumed."""
SPARE_BYTES = 4 << 20
"""Room on the disk, beside that for a model, that is kept for the last words of a run."""
PACKAGES = ("cloister", "flwr", "tensorflow", "keras", "numpy", "scikit-learn", "dp-accounting", "cryptography")


class RunDirectory:
    """`<output-dir>/<name>/` of one run.

    Args:
        path: absolute.
        coarse: whether the times of its files are to tell no more than the day.

    Attributes:
        name: of the run in the ledger: that of the directory when it was made.
    """

    def __init__(self, path: Path, coarse: bool = False) -> None:
        self.path = path
        self.name = path.name
        self.checkpoints = path / "checkpoints"
        self.coarse = coarse

    @classmethod
    def create(cls, plan: Plan, bundle: str = "", clients: int = 0) -> "RunDirectory":
        """A new directory with `config.json` in it, and with `simulation.json` where clients are simulated.

        Args:
            plan: of the run.
            bundle: SHA-256 of the app bundle that Flower runs; empty: it runs none.
            clients: how many this process simulates; 0: none.

        Raises:
            ConfigError: `run-name` is taken or is no name for a directory, or the place cannot be written.
        """
        config = plan.config
        try:
            root = expanded(config.output_dir).resolve()
            path = _named(root, config) if config.run_name else _unnamed(root, config)
            directory = cls(path, plan.hides_times)
            directory.checkpoints.mkdir()
        except OSError as error:
            reason = "it is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
            raise ConfigError(
                f"output-dir = {config.output_dir!r} cannot be written: {reason}; name a folder that can"
            ) from error
        with directory._gone_if_it_fails():
            if clients:
                # For whoever audits the run, or resumes it: with the seed, this says which examples were whose.
                directory.write_json(SIMULATION, {"clients": clients})
            directory.write_json("config.json", directory._facts(plan, bundle))
        return directory

    @contextmanager
    def begun(self) -> Iterator["RunDirectory"]:
        """As `held`, for a new directory: an error before the run has begun takes it away."""
        with self._gone_if_it_fails(), self.held():
            yield self

    @contextmanager
    def _gone_if_it_fails(self) -> Iterator[None]:
        """The block; if it ends with an error before the run has its first words on privacy, nothing is left of it."""
        try:
            yield
        except (CloisterError, OSError):
            if not (self.path / PRIVACY).exists():
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    @contextmanager
    def held(self) -> Iterator["RunDirectory"]:
        """The block, in which this process is known to run.

        Raises:
            ConfigError: another process runs.
        """
        running = self.path / RUNNING
        # Not through a link, nor what is in it cut off: somebody else may have made the directory.
        with os.fdopen(os.open(running, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as lock:
            if not _is_locked(lock, running):
                raise ConfigError(f"resume: a process of this machine is at the run in {self.path}")
            try:
                yield self
            finally:
                self.make_room()
                running.unlink(missing_ok=True)
                self.settle()

    def reserve(self, room: int) -> None:
        """Keep some room on the disk for the end of the run, as long as the directory is held.

        Args:
            room: bytes, beside `SPARE_BYTES`.

        Raises:
            ConfigError: there is no such room.
        """
        room += SPARE_BYTES
        self.make_room()
        try:
            with (self.path / RESERVE).open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, room)
        except OSError as error:
            raise ConfigError(
                f"output-dir: {self.path} has no room for {room >> 20} MB, which the end of a run may need: "
                f"{error.strerror}"
            ) from error

    def make_room(self) -> None:
        """Give up the room that was kept, for what is written last."""
        (self.path / RESERVE).unlink(missing_ok=True)

    def settle(self) -> None:
        """Take the times from all files, if they would tell something."""
        if self.coarse and self.path.is_dir():
            settle(self.path)

    def announce(self) -> None:
        """Tell whoever keeps this process going, if anybody does, which run to resume."""
        if place := os.environ.get(ANNOUNCED):
            with atomic_path(Path(place)) as partial:
                partial.write_text(str(self.path))

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        """Write a JSON file, whole."""
        with atomic_path(self.path / name) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n")
        self.settle()

    def read_json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file; empty if there is none."""
        path = self.path / name
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def append_round(self, line: Mapping[str, object]) -> None:
        """Add a line to `rounds.jsonl`."""
        with (self.path / ROUNDS).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.settle()

    def checkpoint_path(self, server_round: int) -> Path:
        """Where the model of a round is."""
        return self.checkpoints / f"round-{server_round:05d}.npz"

    def checkpoint(self, server_round: int, arrays: ArrayRecord) -> None:
        """Write the model of a round."""
        write_npz(self.checkpoint_path(server_round), from_record(arrays))
        self.settle()

    def prune(self, keep: int) -> None:
        """Keep the newest `keep` checkpoints, or all if it is 0."""
        saved = sorted(self.checkpoints.glob("round-*.npz"))
        for old in saved[:-keep] if keep else []:
            old.unlink()
        self.settle()

    def cut(self, server_round: int) -> list[dict[str, Any]]:
        """Take away what was written of rounds after this one, half a line too.

        Args:
            server_round: the last one that counts; -1: none.

        Returns:
            The lines of `rounds.jsonl` that are left.

        Raises:
            ConfigError: the file holds something else; nothing was taken away.
        """
        path = self.path / ROUNDS
        try:
            whole = read_text(path).rpartition("\n")[0].splitlines() if path.exists() else []
            kept = [line for line in map(json.loads, whole) if line["round"] <= server_round]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"resume: {path} is not what a run writes: {type(error).__name__}") from None
        with atomic_path(path) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        for later in (*self.checkpoints.glob("round-*.npz"), *self.path.glob("state-*.npz")):
            number = later.stem.rpartition("-")[2]
            if number.isdecimal() and int(number) > server_round:
                later.unlink()
        return kept

    def go_on(self, plan: Plan, after: Sequence[int], bundle: str = "") -> None:
        """Say in `config.json` that the run was resumed, and take away the page that claims what it came to before.

        Args:
            plan: of the run from here on.
            after: which rounds it was resumed, in order.
            bundle: as in `create`.
        """
        self.coarse = plan.hides_times
        (self.path / REPORT).unlink(missing_ok=True)
        # When it was resumed would tell how long the rounds until then took.
        begun = self.read_json("config.json").get(BEGUN, 0)
        self.write_json("config.json", self._facts(plan, bundle) | {BEGUN: begun, RESUMED: list(after)})

    def _facts(self, plan: Plan, bundle: str) -> dict[str, object]:
        config = plan.config.model_copy(update={"resume": ""})
        return {
            NAME: self.name,
            BEGUN: int(time.time()),
            "config": config.flat(),
            "config-sha256": config.digest(),
            "seed": plan.seed,
            "versions": {name: found for name in PACKAGES if (found := _version(name))},
            **({"bundle-sha256": bundle} if bundle else {}),
        }

    def copy_ledger(self, ledger: Path) -> None:
        """Keep a copy of the ledger as it is at the end of the run: earlier runs on the same data included."""
        if ledger.exists():
            with atomic_path(self.path / LEDGER) as partial:
                shutil.copyfile(ledger, partial)
            self.settle()


def refuse_name(config: RunConfig) -> None:
    """Refuse a `run-name` that a new run cannot have.

    Raises:
        ConfigError: it is taken, or is no name for a directory.
    """
    name = config.run_name
    if not name or config.resume:
        return
    if not RUN_NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(f"run-name = {name!r} must be at most 200 letters, digits, '.', '_' and '-'")
    path = expanded(config.output_dir).resolve() / name
    if path.exists():
        raise ConfigError(
            f"run-name = {name!r} is taken: {path} exists; {_way_on(path)}choose another or leave it empty"
        )


def _way_on(path: Path) -> str:
    """What else there is to do about a taken name, if its run may go on: nobody has to find that in the docs."""
    with suppress(ConfigError, AttributeError):
        how = read_json(path / PRIVACY).get("ended", {}).get("how")
        if how in RESUMABLE:
            return f"resume = {str(path)!r} goes on with that run, which ended by {how!r}; or "
    return ""


def _named(root: Path, config: RunConfig) -> Path:
    refuse_name(config)
    path = root / config.run_name
    path.mkdir(parents=True)
    return path


def _unnamed(root: Path, config: RunConfig) -> Path:
    """A directory named for the moment and the run; a number is added until it is new."""
    root.mkdir(parents=True, exist_ok=True)
    mechanisms = [side.name for side in (config.privacy.server, config.privacy.client) if side.name != "none"]
    parts = (config.task.name, config.strategy.name, *(mechanisms or ["none"]))
    name = "-".join((time.strftime("%Y%m%d-%H%M%S"), *parts))
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        try:
            (root / (name + suffix)).mkdir()
        except FileExistsError:
            continue
        return root / (name + suffix)
    raise ConfigError(f"output-dir = {config.output_dir!r} holds too many runs of this second")


def _is_locked(lock: IO[bytes], path: Path) -> bool:
    """Whether this process has got the lock on a file, and the file is still there for others to find it locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it takes the file away, maybe since it was opened here; then another process may have a new one.
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
