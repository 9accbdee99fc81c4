"""Storage of a node's attempt at a round of secure aggregation between messages.

`AttemptStore.take` removes an attempt until the next step stores it again. So no state serves two steps, for any
number, order and concurrency of a server's requests. The store contains at most one attempt of a run. In steps of
DP-SGD it contains the state of an epoch, which `replace` exchanges for that of the next round before a vector is made.
`begin` lets an epoch begin once at each round until the node restarts, so that the node signs one key for it.

| store | for | where |
|---|---|---|
| `MemoryStore` | simulated nodes of one process | the memory of this process |
| `FolderStore` | a node with a process for each message | files in a folder in memory |
"""

import fcntl
import os
import stat
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flwr.app import ConfigRecord, RecordDict

from cloister.utils.errors import NodeConfigError, ProtocolError
from cloister.utils.files import DAY, expanded
from cloister.utils.wire import config_of
from cloister.utils.wire import number as whole_number

STATE = "secure-round"
"""Record of the last round that a node has begun in a run, without secrets."""
NO_ROUND = -1
Result = TypeVar("Result")


class AttemptStore(ABC):
    """Store of the attempt of each run, and of the last round that was begun; or of an epoch of rounds."""

    def begin(self, run: str, number: int) -> None:
        """Record the start of a round, and discard the attempt at an earlier one.

        It is discarded even if the start is refused.

        Args:
            run: id of the run.
            number: of the round.

        Raises:
            ProtocolError: this round or a later one has begun already.
        """
        with self._alone():
            self._put(run, b"")
            if number <= self._last(run):
                raise ProtocolError(f"this node has begun round {number} of this run before, or a later one")
            self._note(run, number)

    def keep(self, run: str, number: int, attempt: bytes) -> None:
        """Store an attempt until it is taken.

        Args:
            run: id of the run.
            number: of the round.
            attempt: the state for the next step.

        Raises:
            ProtocolError: another round has begun since.
        """
        with self._alone():
            if number != self._last(run):
                raise ProtocolError(f"another round was begun since; the attempt at round {number} is over")
            self._put(run, attempt)

    def take(self, run: str, number: int) -> bytes:
        """Remove an attempt from the store and return it; empty if there is none.

        Args:
            run: id of the run.
            number: of the round. The attempt at another round stays.

        Raises:
            ProtocolError: the stored content is damaged, or another process stored it.
        """
        with self._alone():
            if number != self._last(run):
                return b""
            attempt = self._get(run)
            self._put(run, b"")
        return attempt

    def replace(self, run: str, step: Callable[[bytes], tuple[bytes, Result]]) -> Result:
        """Replace the state of an epoch by a step, and return its result.

        No other message finds the state before the step, nor without it. A step that raises leaves no state.

        Args:
            run: id of the run.
            step: returns the next state and its result, from the stored state; empty: there is none.

        Raises:
            ProtocolError: the stored content is damaged, or another process stored it.
        """
        with self._alone():
            state = self._get(run)
            self._put(run, b"")
            after, result = step(state)
            self._put(run, after)
        return result

    @abstractmethod
    def _alone(self) -> AbstractContextManager[None]:
        """Hold exclusive access to the store within the block."""

    @abstractmethod
    def _get(self, run: str) -> bytes:
        """Return the attempt of a run; empty if there is none."""

    @abstractmethod
    def _put(self, run: str, attempt: bytes) -> None:
        """Replace the attempt of a run; empty: clear it."""

    @abstractmethod
    def _last(self, run: str) -> int:
        """Return the number of the last round that was begun; `NO_ROUND`: none."""

    @abstractmethod
    def _note(self, run: str, number: int) -> None:
        """Store the number of the last round that was begun."""


@dataclass
class _Memory:
    """Attempt of one node in this process, with the process that stored it, since a fork has a copy."""

    attempt: bytes = b""
    process: int = 0


_memories: dict[int, _Memory] = {}
"""Attempts by the identity of a node's state."""
_remembering = threading.Lock()


class MemoryStore(AttemptStore):
    """Store in the memory of this process, for the lifetime of the node's state and for one run.

    Args:
        state: of the node; it contains the number of the last round, and no secret.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _remembering:
            if (key := id(self._state)) not in _memories:
                _memories[key] = _Memory()
                weakref.finalize(self._state, _memories.pop, key, None)
            yield

    def _get(self, run: str) -> bytes:
        memory = _memories[id(self._state)]
        attempt = memory.attempt
        if attempt and memory.process != os.getpid():
            raise ProtocolError("the attempt began in another process, which may go on with it; this one does not")
        return attempt

    def _put(self, run: str, attempt: bytes) -> None:
        memory = _memories[id(self._state)]
        memory.attempt, memory.process = attempt, os.getpid()

    def _last(self, run: str) -> int:
        last = config_of(self._state, STATE)
        return int(whole_number(last, "round")) if last and last["run"] == run else NO_ROUND

    def _note(self, run: str, number: int) -> None:
        self._state[STATE] = ConfigRecord({"run": run, "round": number})


IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems in memory."""
MOUNTS = Path("/proc/self/mountinfo")
DIGITS = 20
"""Digits of the number of a round in a file."""
SUFFIX, ROUND = ".attempt", ".round"
MAXIMUM_WAIT = DAY
"""Maximum seconds that an attempt waits for its next step."""


class FolderStore(AttemptStore):
    """Store in files of a folder in memory, into which only this user can look.

    An unfinished attempt is removed after a day. The node has then dropped out of that round.

    Args:
        folder: its path.
    """

    def __init__(self, folder: str) -> None:
        self._folder = expanded(folder)

    def clear(self) -> None:
        """Remove all attempts and the numbers of rounds.

        Raises:
            NodeConfigError: the folder is unsuitable for secrets.
        """
        with self._alone():
            for path in self._folder.iterdir():
                path.unlink()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            _refuse_unsafe(self._folder)
            handle = os.open(self._folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                for path in self._folder.glob(f"*{SUFFIX}"):
                    if time.time() - path.stat().st_mtime > MAXIMUM_WAIT:
                        path.unlink()
                yield
            finally:
                os.close(handle)
        except OSError as error:
            raise NodeConfigError(f"secure-state {self._folder}: {error.strerror}") from None

    def _get(self, run: str) -> bytes:
        path = self._folder / f"{run}{SUFFIX}"
        return path.read_bytes() if path.exists() else b""

    def _put(self, run: str, attempt: bytes) -> None:
        path = self._folder / f"{run}{SUFFIX}"
        path.unlink(missing_ok=True)
        if attempt:
            path.write_bytes(attempt)

    def _last(self, run: str) -> int:
        path = self._folder / f"{run}{ROUND}"
        if not path.exists():
            return NO_ROUND
        found = path.read_bytes()
        if len(found) != DIGITS or not found.isdigit():
            raise ProtocolError("what is kept of the last round is no number; this node takes no part in the run")
        return int(found)

    def _note(self, run: str, number: int) -> None:
        path = self._folder / f"{run}{ROUND}"
        path.with_suffix(".new").write_bytes(b"%0*d" % (DIGITS, number))
        path.with_suffix(".new").replace(path)  # so that a number is there at all times


def _refuse_unsafe(folder: Path) -> None:
    """Refuse a folder for secrets that another user can look into, or that is on a disk.

    Raises:
        NodeConfigError: it is one.
    """
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode != stat.S_IFDIR | stat.S_IRWXU:
        raise NodeConfigError(f"secure-state {folder} must be a folder of this user, with mode 0700: secrets lie in it")
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    mounts = (line.partition(" - ") for line in MOUNTS.read_text().splitlines())
    kinds = (system.split()[0] for mount, _, system in mounts if mount.split()[2] == device)
    kind = next(kinds, "a file system of unknown kind")
    if kind not in IN_MEMORY:
        raise NodeConfigError(f"secure-state {folder} is on {kind}; it must be in memory: {' or '.join(IN_MEMORY)}")
