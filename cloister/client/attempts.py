"""Storage of a node's attempt at a round of secure aggregation between messages.

`AttemptStore.take` removes an attempt until the next step stores it again. So no step runs twice, for any number, order
and concurrency of a server's requests. The store contains at most one attempt of a run.

| store | for | where |
|---|---|---|
| `MemoryStore` | simulated nodes of one process | the memory of this process |
| `FolderStore` (`client/attempts_folder.py`) | a node with a process for each message | files in a folder in memory |
"""

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from cloister.core.errors import ProtocolError
from cloister.core.wire import number as whole_number

STATE = "secure-round"
"""Record of the last round that a node has begun in a run, without secrets."""
NO_ROUND = -1


class AttemptStore(ABC):
    """Store of the attempt of each run, and of the last round that was begun."""

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
        last = self._state.config_records.get(STATE)
        return int(whole_number(last, "round")) if last and last["run"] == run else NO_ROUND

    def _note(self, run: str, number: int) -> None:
        self._state.config_records[STATE] = ConfigRecord({"run": run, "round": number})
