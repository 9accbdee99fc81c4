"""Where a node keeps an attempt at a round of a secure aggregation from one message to the next.

Whoever takes an attempt has it alone: nobody finds it any more, until the next step was made and it is kept again. So
no step is made twice, however often, in whatever order and how many at a time a server asks for steps. Of a run two
attempts are kept at most: at a round, and an early one at the round after it.

| keeper | for | where |
|---|---|---|
| `InMemory` | nodes that one process plays | the memory of this process |
| `InFolder` | a node that starts a process for each message | files in a folder that is in memory, and on no disk |
"""

import fcntl
import os
import stat
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from flwr.app import ConfigRecord, RecordDict

from cloister.core.errors import NodeConfigError, ProtocolError
from cloister.core.files import expanded
from cloister.core.wire import number
from cloister.secure_aggregation.canonical import read, text
from cloister.secure_aggregation.terms import EARLY, ORDINARY

STATE = "secure-turn"
"""The record of the last turn that a node has taken in a run; it holds no secret."""
IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems that lie on no disk."""
MOUNTS = Path("/proc/self/mountinfo")
LABEL = "kept in this file"
DIGITS = 20
"""Of the number of a turn in a file."""
OWN = stat.S_IRUSR | stat.S_IWUSR
SUFFIX, TURN = ".attempt", ".turn"
MAXIMUM_ATTEMPTS = 64
"""Attempts that a folder keeps, two of a run at most: of more the one that has waited longest is over."""
MAXIMUM_WAIT = 86_400.0
"""Seconds that an attempt waits for its next step."""
VECTOR = 3
"""The stage of a round after its attempts: the update leaves in one of them, and in no other."""
STAGES = (EARLY, ORDINARY, VECTOR)
PLACES = (0, 1)
"""Where attempts of a run are kept: those at even rounds, and those at odd ones."""


@dataclass(frozen=True)
class Turn:
    """What a node takes part in. It takes no turn but later ones than the last.

    Args:
        round: number of the round.
        stage: `EARLY` or `ORDINARY`, in which an attempt begins, or `VECTOR`.
    """

    round: int
    stage: int

    @property
    def number(self) -> int:
        """A number that is larger for every later turn."""
        return len(STAGES) * self.round + self.stage

    @property
    def place(self) -> int:
        """Where an attempt at this round is kept."""
        return _place_of(self.round)

    @property
    def ends(self) -> tuple[int, ...]:
        """The places of attempts that are over with this turn: an early one lets the round before go on."""
        return (self.place,) if self.stage == EARLY else PLACES


class Keeper(ABC):
    """Keeps the attempts of each run, and the last turn that was taken in it."""

    def begin(self, run: str, turn: Turn, after: Turn | None = None) -> None:
        """Note that a turn is taken. An attempt that was not finished is over, also if the turn is refused.

        Args:
            run: which run.
            turn: an attempt that begins; or that an update is about to leave in the one that was taken.
            after: the turn that has to be the last one; None: any earlier one may be.

        Raises:
            ProtocolError: this turn, or a later one, was taken before; or another one than `after` was the last.
        """
        with self._alone():
            for place in turn.ends:
                self._put(run, place, b"")
            last = self._last(run)
            if turn.number <= last or (after is not None and after.number != last):
                raise ProtocolError(f"this node has taken part in round {turn.round} of this run or a later one")
            self._note(run, turn.number)

    def keep(self, run: str, turn: Turn, attempt: bytes) -> None:
        """Keep an attempt until it is taken.

        Args:
            run: which run.
            turn: the last one that was taken in this attempt.
            attempt: what has to be known for the next step.

        Raises:
            ProtocolError: another turn was taken in the meantime.
        """
        with self._alone():
            if turn.number != self._last(run):
                raise ProtocolError(f"another round was begun since; the attempt at round {turn.round} is over")
            self._put(run, turn.place, attempt)

    def take(self, run: str, number: int) -> bytes:
        """What is kept of an attempt, which nobody finds from then on; empty if there is none.

        Args:
            run: which run.
            number: of the round.

        Raises:
            ProtocolError: what is there is not what this keeper has put there.
        """
        place = _place_of(number)
        with self._alone():
            attempt = self._get(run, place)
            self._put(run, place, b"")
        return attempt

    @abstractmethod
    def _alone(self) -> AbstractContextManager[None]:
        """The block, in which nobody else works on what is kept."""

    @abstractmethod
    def _get(self, run: str, place: int) -> bytes:
        """The attempt at a place; empty if there is none."""

    @abstractmethod
    def _put(self, run: str, place: int, attempt: bytes) -> None:
        """Have this attempt in place of the one that is there; empty: none."""

    @abstractmethod
    def _last(self, run: str) -> int:
        """The number of the last turn that was taken; 0: none."""

    @abstractmethod
    def _note(self, run: str, number: int) -> None:
        """Have this as the number of the last turn."""


class _Kept(NamedTuple):
    """An attempt, and the process that remembers it: a fork has a copy of it."""

    attempt: bytes = b""
    process: int = 0


@dataclass
class _Memory:
    """What a process remembers of a node, by place."""

    kept: tuple[_Kept, ...] = (_Kept(),) * len(PLACES)


_memories: dict[int, _Memory] = {}
"""By the identity of the state of a node."""
_remembering = threading.Lock()


class InMemory(Keeper):
    """In the memory of this process, for as long as the node's state is there; for one run.

    Args:
        state: of the node, in which it keeps the number of the last turn, and no secret.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _remembering:
            if (place := id(self._state)) not in _memories:
                _memories[place] = _Memory()
                weakref.finalize(self._state, _memories.pop, place, None)
            yield

    def _get(self, run: str, place: int) -> bytes:
        attempt, process = _memories[id(self._state)].kept[place]
        if attempt and process != os.getpid():
            raise ProtocolError("the attempt began in another process, which may go on with it; this one does not")
        return attempt

    def _put(self, run: str, place: int, attempt: bytes) -> None:
        memory = _memories[id(self._state)]
        kept = list(memory.kept)
        kept[place] = _Kept(attempt, os.getpid())
        memory.kept = tuple(kept)

    def _last(self, run: str) -> int:
        last = self._state.config_records.get(STATE, ConfigRecord({"run": "", "turn": 0}))
        return int(number(last, "turn")) if last["run"] == run else 0

    def _note(self, run: str, number: int) -> None:
        self._state.config_records[STATE] = ConfigRecord({"run": run, "turn": number})


class InFolder(Keeper):
    """In files that this user alone can read, in a folder of its own that is in memory.

    A file says in which place it was made, and counts there alone: a copy of it, or of the folder, gives no attempt.
    What a server never ends is over after a day, or when it has begun many others: the node has dropped out of it. To
    refuse new ones instead would keep it from all rounds once so many runs had been killed.

    Args:
        folder: its path.
    """

    def __init__(self, folder: str) -> None:
        self._path, self._folder = folder, -1

    def clear(self) -> None:
        """Remove all that is kept here.

        Raises:
            NodeConfigError: the folder is not one to keep secrets in.
        """
        with self._alone():
            for name in os.listdir(self._folder):
                os.unlink(name, dir_fd=self._folder)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _files_of(self._path):
            self._folder = _opened(self._path)
            try:
                fcntl.flock(self._folder, fcntl.LOCK_EX)
                self._end_those_left(MAXIMUM_ATTEMPTS)
                yield
            finally:
                os.close(self._folder)

    def _end_those_left(self, most: int) -> None:
        """Remove attempts that have waited too long for their next step, and the oldest of too many."""
        names = [name for name in os.listdir(self._folder) if name.endswith(SUFFIX)]
        since = {name: os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime for name in names}
        newest = sorted(names, key=since.__getitem__, reverse=True)
        for place, name in enumerate(newest):
            if place >= most or time.time() - since[name] > MAXIMUM_WAIT:
                os.unlink(name, dir_fd=self._folder)

    def _get(self, run: str, place: int) -> bytes:
        try:
            file = self._open(_name(run, place), os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(file, "rb") as opened:
            here, content = _place(file), opened.read()
        try:
            (*written_in, attempt) = read(LABEL, content)
        except ValueError:
            written_in, attempt = [], b""
        if written_in != here:
            self._put(run, place, b"")
            raise ProtocolError("what is kept of the attempt is torn, or a copy; the attempt is over")
        return cast(bytes, attempt)

    def _put(self, run: str, place: int, attempt: bytes) -> None:
        name = _name(run, place)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)
        if attempt:
            self._end_those_left(MAXIMUM_ATTEMPTS - 1)
            file = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(file, "wb") as opened:
                opened.write(text(LABEL, *_place(file), attempt))

    def _last(self, run: str) -> int:
        try:
            file = self._open(f"{run}{TURN}", os.O_RDONLY)
        except FileNotFoundError:
            return 0
        with os.fdopen(file, "rb") as opened:
            found = opened.read()
        if len(found) != DIGITS or not found.isdigit():
            raise ProtocolError("what is kept of the last turn is no number; this node takes no part in the run")
        return int(found)

    def _note(self, run: str, number: int) -> None:
        file = self._open(f"{run}{TURN}", os.O_WRONLY | os.O_CREAT)
        try:
            # As long as the number before it: at no time there is another one.
            os.pwrite(file, b"%0*d" % (DIGITS, number), 0)
        finally:
            os.close(file)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, OWN, dir_fd=self._folder)


def _place_of(number: int) -> int:
    """Where an attempt at the round with this number is kept."""
    return number % len(PLACES)


def _name(run: str, place: int) -> str:
    return f"{run}.{place}{SUFFIX}"


@contextmanager
def _files_of(path: str) -> Iterator[None]:
    """What the system says about files in the folder, as the operator of the node is to hear it."""
    try:
        yield
    except OSError as error:
        raise NodeConfigError(f"secure-state {path}: {error.strerror}") from None


def _opened(path: str) -> int:
    """The folder, open, so that all that follows is about the one that was looked at.

    Raises:
        NodeConfigError: somebody else could read or change what is in it, or it lies on a disk.
    """
    folder = os.open(expanded(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
            raise NodeConfigError(f"secure-state {path} must belong to this user, with mode 0700: secrets lie in it")
        if (kind := _file_system(found.st_dev)) not in IN_MEMORY:
            raise NodeConfigError(f"secure-state {path} is on {kind}; it must be in memory: {' or '.join(IN_MEMORY)}")
    except BaseException:
        os.close(folder)
        raise
    return folder


def _file_system(device: int) -> str:
    """The kind of the file system with this device number."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTS.read_text().splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == number:
            return system.split()[0]
    return "a file system of unknown kind"


def _place(file: int) -> list[int]:
    """What no copy of a file, and no second name of it, has in common with it."""
    found = os.fstat(file)
    return [found.st_dev, found.st_ino, found.st_nlink]
