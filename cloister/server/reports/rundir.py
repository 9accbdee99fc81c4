"""Run directory: all files of a run, written so that a crash leaves complete files."""

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

from flwr.app import ArrayRecord

from cloister import __version__
from cloister.config.run import RunConfig
from cloister.server.build import Plan
from cloister.utils.arrays import from_record
from cloister.utils.errors import CloisterError, ConfigError
from cloister.utils.files import JsonTable, atomic_path, complete_lines, expanded, read_json, write_npz

RUNNING = "running"
"""Lock file that the process of a run holds until the process ends, in any way."""
RESERVE = ".reserve"
RUN_NAME = re.compile(r"[\w.-]{1,200}")
NAME = "run"
"""Key in `config.json`: the name of the run in the ledger, kept if the directory is moved."""
ROUNDS = "rounds.jsonl"
SIMULATION = "simulation.json"
BEGUN = "begun"
"""Key in `config.json`: start of the run in seconds since 1970."""
RESUMED = "resumed-after"
"""Key in `config.json`: the rounds after which the run was resumed."""
HIDES_TIMES = "hides-times"
"""Key in `config.json` of a run whose durations would reveal a draw: its records contain no times. File dates do."""
SEEN = "draws-are-seen"
"""Fact of a run that has sent messages over a SuperLink by which nodes may learn who is drawn."""
ANNOUNCED = "CLOISTER_RUN_FILE"
"""Environment variable: a file that receives the path of the run directory."""
EVALUATION = "evaluation.json"
PARAMETERS = "parameters.json"
REPORT = "report.html"
LEDGER = "ledger.jsonl"
PRIVACY = "privacy.json"
"""Written first when a run begins, and last when it ends."""
RESUMABLE = ("site-budgets", "operator", "too-few-nodes", "disk", "no-replies", "error")
"""Values of `how` in `privacy.json` for a run that may be resumed."""
SPARE_BYTES = 4 << 20
"""Disk space, beside that for a model, that is reserved for the final files of a run."""
PACKAGES = ("flwr", "tensorflow", "keras", "torch", "numpy", "scikit-learn", "dp-accounting", "cryptography")


class RunDirectory:
    """Directory `<output-dir>/<name>/` of one run.

    Args:
        path: absolute.

    Attributes:
        name: of the run in the ledger; the directory's name at its creation.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, plan: Plan, bundle: str = "", clients: int = 0) -> "RunDirectory":
        """Create a directory with `config.json`, and `simulation.json` if needed.

        The latter contains the number of simulated clients.

        Args:
            plan: of the run.
            bundle: SHA-256 of the app bundle that Flower runs; empty: there is none.
            clients: number of clients that this process simulates; 0: none.

        Raises:
            ConfigError: `run-name` is taken or invalid, or `output-dir` cannot be written.
        """
        config = plan.config
        try:
            root = expanded(config.output_dir).resolve()
            if config.run_name:
                refuse_name(config)
                path = root / config.run_name
                path.mkdir(parents=True)
            else:
                path = _unnamed(root, config)
            directory = cls(path)
            directory.checkpoints.mkdir()
        except OSError as error:
            reason = "it is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
            raise ConfigError(
                f"output-dir = {config.output_dir!r} cannot be written: {reason}; name a folder that can"
            ) from error
        with directory._gone_if_it_fails():
            if clients:
                # An audit or a resume uses this: with the seed, it determines each client's examples.
                directory.write_json(SIMULATION, {"clients": clients})
            directory.write_json("config.json", directory._facts(plan, bundle))
        return directory

    @contextmanager
    def begun(self) -> Iterator["RunDirectory"]:
        """Hold the lock of a new directory; remove it if the run does not begin."""
        with self._gone_if_it_fails(), self.held():
            yield self

    @contextmanager
    def _gone_if_it_fails(self) -> Iterator[None]:
        """Remove the directory after an error, unless `privacy.json` exists."""
        try:
            yield
        except (CloisterError, OSError):
            if not (self.path / PRIVACY).exists():
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    @contextmanager
    def held(self) -> Iterator["RunDirectory"]:
        """Hold the lock of the run within the block.

        Raises:
            ConfigError: another process holds it.
        """
        running = self.path / RUNNING
        # Do not follow a link or truncate the file: another user may have created the directory.
        with os.fdopen(os.open(running, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder deletes the file, maybe after this process opened it. Another process may own a
                # new one.
                is_held = os.path.samestat(os.fstat(lock.fileno()), os.stat(running, follow_symlinks=False))
            except (BlockingIOError, FileNotFoundError):
                is_held = False
            if not is_held:
                raise ConfigError(f"resume: a process of this machine is at the run in {self.path}")
            try:
                yield self
            finally:
                self.make_room()
                running.unlink(missing_ok=True)

    def reserve(self, room: int) -> None:
        """Reserve disk space for the end of the run, as long as the lock is held.

        Args:
            room: bytes, beside `SPARE_BYTES`.

        Raises:
            ConfigError: the disk has too little space.
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
        """Release the reserved disk space for the final files."""
        (self.path / RESERVE).unlink(missing_ok=True)

    def announce(self) -> None:
        """Write the path of the run for a supervisor, which can then resume it."""
        if place := os.environ.get(ANNOUNCED):
            with atomic_path(Path(place)) as partial:
                partial.write_text(str(self.path))

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        """Write a JSON file atomically."""
        with atomic_path(self.path / name) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> JsonTable:
        """Return the content of a JSON file; empty if it is absent."""
        path = self.path / name
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def append_round(self, line: Mapping[str, object]) -> None:
        """Append a line to `rounds.jsonl`."""
        with (self.path / ROUNDS).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def checkpoint_path(self, server_round: int) -> Path:
        """Return the path of a round's checkpoint."""
        return self.checkpoints / f"round-{server_round:05d}.npz"

    def checkpoint(self, server_round: int, arrays: ArrayRecord) -> None:
        """Write the checkpoint of a round."""
        write_npz(self.checkpoint_path(server_round), from_record(arrays))

    def prune(self, keep: int) -> None:
        """Delete older checkpoints than the newest `keep`; 0 keeps all."""
        saved = sorted(self.checkpoints.glob("round-*.npz"))
        for old in saved[:-keep] if keep else []:
            old.unlink()

    def cut(self, server_round: int) -> list[JsonTable]:
        """Remove the records of all rounds after a round, and partial lines.

        Args:
            server_round: the last round to keep; -1: none.

        Returns:
            The remaining lines of `rounds.jsonl`.

        Raises:
            ConfigError: the file is damaged; nothing was removed.
        """
        path = self.path / ROUNDS
        try:
            kept = [line for line in map(json.loads, complete_lines(path)) if line["round"] <= server_round]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"resume: {path} is not what a run writes: {type(error).__name__}") from None
        with atomic_path(path) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        for later in (*self.checkpoints.glob("round-*.npz"), *self.path.glob("state-*.npz")):
            number = later.stem.rpartition("-")[2]
            if number.isdecimal() and int(number) > server_round:
                later.unlink()
        return kept

    def go_on(self, plan: Plan, after: Sequence[int], bundle: str = "") -> None:
        """Record a resume in `config.json`, and remove the outdated report.

        Args:
            plan: of the resumed run.
            after: the rounds after which the run was resumed, in order.
            bundle: as in `create`.
        """
        (self.path / REPORT).unlink(missing_ok=True)
        # The time of a resume would reveal the duration of the previous rounds.
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
            # A bundle's own version, wherever it runs.
            "versions": {"cloister-fl": __version__} | {name: found for name in PACKAGES if (found := _version(name))},
            **({"bundle-sha256": bundle} if bundle else {}),
            **({SEEN: True} if plan.strategy.draws_are_seen else {}),
            **({HIDES_TIMES: True} if plan.hides_times else {}),
        }

    def copy_ledger(self, ledger: Path) -> None:
        """Copy the ledger at the end of the run, with its earlier runs."""
        if ledger.exists():
            with atomic_path(self.path / LEDGER) as partial:
                shutil.copyfile(ledger, partial)


def refuse_name(config: RunConfig) -> None:
    """Refuse a `run-name` that a new run cannot have.

    Raises:
        ConfigError: it is taken or invalid.
    """
    name = config.run_name
    if not name or config.resume:
        return
    if not RUN_NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(f"run-name = {name!r} must be at most 200 letters, digits, '.', '_' and '-'")
    path = expanded(config.output_dir).resolve() / name
    if path.exists():
        hint = ""
        with suppress(ConfigError, AttributeError):
            how = read_json(path / PRIVACY).get("ended", {}).get("how")
            if how in RESUMABLE:
                hint = f"resume = {str(path)!r} goes on with that run, which ended by {how!r}; or "
        raise ConfigError(f"run-name = {name!r} is taken: {path} exists; {hint}choose another or leave it empty")


def _unnamed(root: Path, config: RunConfig) -> Path:
    """Create a directory named by time and run, numbered if the name is taken."""
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
