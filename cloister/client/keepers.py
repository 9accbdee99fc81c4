"""Where a node keeps an attempt at a round of a secure aggregation from one message to the next.

Whoever takes an attempt has it alone: nobody finds it any more, until the next step was made and it is kept again. So
no step is made twice, however often, in whatever order and how many at a time a server asks for steps.

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
from typing import cast

from flwr.app import ConfigRecord, RecordDict

from cloister.core.errors import NodeConfigError, ProtocolError
from cloister.core.files import expanded
from cloister.core.wire import number
from cloister.secure_aggregation.canonical import read, text

STATE = "secure-aggregation"
"""The record of the last round that a node has taken part in; it holds no secret."""
IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems that lie on no disk."""
MOUNTS = Path("/proc/self/mountinfo")
LABEL = "kept in this file"
DIGITS = 20
"""Of the number of a round in a file."""
OWN = stat.S_IRUSR | stat.S_IWUSR
SUFFIX = ".attempt"
MAXIMUM_ATTEMPTS = 32
"""Attempts that a folder keeps, each of another run: of more the one that has waited longest is over."""
MAXIMUM_WAIT = 86_400.0
"""Seconds that an attempt waits for its next step."""


class Keeper(ABC):
    """Keeps one attempt for each run, and the number of the last round that was begun in it."""

    def begin(self, run: str, number: int) -> None:
        """Note that a round is begun. An attempt that was not finished is over.

        Args:
            run: which run.
            number: of the round.

        Raises:
            ProtocolError: this round, or a later one, was begun before.
        """
        with self._alone():
            self._put(run, b"")
            if number <= self._last(run):
                raise ProtocolError(f"this node has taken part in round {number} of this run or a later one")
            self._note(run, number)

    def keep(self, run: str, number: int, attempt: bytes) -> None:
        """Keep an attempt until it is taken.

        Args:
            run: which run.
            number: of the round.
            attempt: what has to be known for the next step.

        Raises:
            ProtocolError: a later round was begun in the meantime.
        """
        with self._alone():
            if number != self._last(run):
                raise ProtocolError(f"another round was begun since; the attempt at round {number} is over")
            self._put(run, attempt)

    def take(self, run: str) -> bytes:
        """What is kept of an attempt, which nobody finds from then on; empty if there is none.

        Raises:
            ProtocolError: what is there is not what this keeper has put there.
        """
        with self._alone():
            attempt = self._get(run)
            self._put(run, b"")
        return attempt

    @abstractmethod
    def _alone(self) -> AbstractContextManager[None]:
        """The block, in which nobody else works on what is kept."""

    @abstractmethod
    def _get(self, run: str) -> bytes:
        """The attempt; empty if there is none."""

    @abstractmethod
    def _put(self, run: str, attempt: bytes) -> None:
        """Have this attempt in place of the one that is there; empty: none."""

    @abstractmethod
    def _last(self, run: str) -> int:
        """The last round that was begun; 0: none."""

    @abstractmethod
    def _note(self, run: str, number: int) -> None:
        """Have this as the last round."""


@dataclass
class _Memory:
    """What a process remembers of a node, and which process it is: a fork has a copy of it."""

    attempt: bytes = b""
    process: int = 0


_memories: dict[int, _Memory] = {}
"""By the identity of the state of a node."""
_remembering = threading.Lock()


class InMemory(Keeper):
    """In the memory of this process, for as long as the node's state is there; for one run.

    Args:
        state: of the node, in which it keeps the number of the last round, and no secret.
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

    def _get(self, run: str) -> bytes:
        memory = _memories[id(self._state)]
        if memory.attempt and memory.process != os.getpid():
            raise ProtocolError("the attempt began in another process, which may go on with it; this one does not")
        return memory.attempt

    def _put(self, run: str, attempt: bytes) -> None:
        memory = _memories[id(self._state)]
        memory.attempt, memory.process = attempt, os.getpid()

    def _last(self, run: str) -> int:
        last = self._state.config_records.get(STATE, ConfigRecord({"run": "", "round": 0}))
        return int(number(last, "round")) if last["run"] == run else 0

    def _note(self, run: str, number: int) -> None:
        self._state.config_records[STATE] = ConfigRecord({"run": run, "round": number})


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

    def _get(self, run: str) -> bytes:
        try:
            file = self._open(f"{run}{SUFFIX}", os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(file, "rb") as opened:
            place, content = _place(file), opened.read()
        try:
            (*written_in, attempt) = read(LABEL, content)
        except ValueError:
            written_in, attempt = [], b""
        if written_in != place:
            self._put(run, b"")
            raise ProtocolError("what is kept of the attempt is torn, or a copy; the attempt is over")
        return cast(bytes, attempt)

    def _put(self, run: str, attempt: bytes) -> None:
        name = f"{run}{SUFFIX}"
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)
        if attempt:
            self._end_those_left(MAXIMUM_ATTEMPTS - 1)
            file = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(file, "wb") as opened:
                opened.write(text(LABEL, *_place(file), attempt))

    def _last(self, run: str) -> int:
        try:
            file = self._open(f"{run}.round", os.O_RDONLY)
        except FileNotFoundError:
            return 0
        with os.fdopen(file, "rb") as opened:
            found = opened.read()
        if len(found) != DIGITS or not found.isdigit():
            raise ProtocolError("what is kept of the last round is no number; this node takes no part in the run")
        return int(found)

    def _note(self, run: str, number: int) -> None:
        file = self._open(f"{run}.round", os.O_WRONLY | os.O_CREAT)
        try:
            # As long as the number before it: at no time there is another one.
            os.pwrite(file, b"%0*d" % (DIGITS, number), 0)
        finally:
            os.close(file)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, OWN, dir_fd=self._folder)


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
