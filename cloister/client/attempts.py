"""Storage of a node's attempt at a round of secure aggregation between messages.

`AttemptStore.take` removes an attempt until the next step stores it again. So no step runs twice, for any number, order
and concurrency of a server's requests. The store contains at most two attempts of a run: one at a round, and an early
one at the next round.

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
from enum import IntEnum
from typing import NamedTuple

from flwr.app import ConfigRecord, RecordDict

from cloister.core.errors import ProtocolError
from cloister.core.wire import number
from cloister.secure_aggregation import terms

STATE = "secure-turn"
"""Record of the last turn of a node in a run, without secrets."""
SLOTS = (0, 1)
"""Slots for the attempts of a run: one for even rounds, one for odd rounds."""


class Stage(IntEnum):
    """Stage of a node in a round: one of two attempts, or the release of its update in one of them."""

    EARLY = terms.EARLY
    ORDINARY = terms.ORDINARY
    VECTOR = 3


class Turn(NamedTuple):
    """Point that a node has reached in a run. Turns are ordered; a node takes each at most once.

    Args:
        round: number of the round.
        stage: of the round.
    """

    round: int
    stage: Stage

    @property
    def number(self) -> int:
        """Return this turn as a number that increases with every later turn."""
        return len(Stage) * self.round + self.stage

    @property
    def slot(self) -> int:
        """Return the slot of an attempt at this round."""
        return slot_of(self.round)

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the slots to clear.

        An early attempt keeps the slot of the previous round.
        """
        return (self.slot,) if self.stage == Stage.EARLY else SLOTS


class AttemptStore(ABC):
    """Store of the attempts of each run, and of its last turn."""

    def begin(self, run: str, turn: Turn, after: Turn | None = None) -> None:
        """Record a turn and discard the attempts that it ends.

        They are discarded even if the turn is refused.

        Args:
            run: id of the run.
            turn: the start of an attempt, or the release of an update in the attempt that was taken.
            after: the required last turn; None: any earlier one.

        Raises:
            ProtocolError: this turn or a later one is already recorded, or the last turn differs from `after`.
        """
        with self._alone():
            for slot in turn.ends:
                self._put(run, slot, b"")
            last = self._last(run)
            if turn.number <= last:
                raise ProtocolError(f"this node has begun round {turn.round} of this run before, or a later one")
            if after is not None and after.number != last:
                raise ProtocolError(f"another attempt has begun since; this one at round {turn.round} is over")
            self._note(run, turn.number)

    def keep(self, run: str, turn: Turn, attempt: bytes) -> None:
        """Store an attempt until it is taken.

        Args:
            run: id of the run.
            turn: the last one of this attempt.
            attempt: the state for the next step.

        Raises:
            ProtocolError: another turn has been recorded since.
        """
        with self._alone():
            if turn.number != self._last(run):
                raise ProtocolError(f"another round was begun since; the attempt at round {turn.round} is over")
            self._put(run, turn.slot, attempt)

    def take(self, run: str, number: int) -> bytes:
        """Remove an attempt from the store and return it; empty if there is none.

        Args:
            run: id of the run.
            number: of the round.

        Raises:
            ProtocolError: the stored content is damaged, or another process stored it.
        """
        slot = slot_of(number)
        with self._alone():
            attempt = self._get(run, slot)
            self._put(run, slot, b"")
        return attempt

    @abstractmethod
    def _alone(self) -> AbstractContextManager[None]:
        """Hold exclusive access to the store within the block."""

    @abstractmethod
    def _get(self, run: str, slot: int) -> bytes:
        """Return the attempt in a slot; empty if there is none."""

    @abstractmethod
    def _put(self, run: str, slot: int, attempt: bytes) -> None:
        """Replace the attempt in a slot; empty: clear it."""

    @abstractmethod
    def _last(self, run: str) -> int:
        """Return the number of the last turn; 0: none."""

    @abstractmethod
    def _note(self, run: str, number: int) -> None:
        """Store the number of the last turn."""


class _Kept(NamedTuple):
    """Attempt, with the process that stored it, since a fork has a copy."""

    attempt: bytes = b""
    process: int = 0


@dataclass
class _Memory:
    """Attempts of one node in this process, by slot."""

    kept: tuple[_Kept, ...] = (_Kept(),) * len(SLOTS)


_memories: dict[int, _Memory] = {}
"""Attempts by the identity of a node's state."""
_remembering = threading.Lock()


class MemoryStore(AttemptStore):
    """Store in the memory of this process, for the lifetime of the node's state and for one run.

    Args:
        state: of the node; it contains the number of the last turn, and no secret.
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

    def _get(self, run: str, slot: int) -> bytes:
        attempt, process = _memories[id(self._state)].kept[slot]
        if attempt and process != os.getpid():
            raise ProtocolError("the attempt began in another process, which may go on with it; this one does not")
        return attempt

    def _put(self, run: str, slot: int, attempt: bytes) -> None:
        memory = _memories[id(self._state)]
        kept = list(memory.kept)
        kept[slot] = _Kept(attempt, os.getpid())
        memory.kept = tuple(kept)

    def _last(self, run: str) -> int:
        last = self._state.config_records.get(STATE)
        return int(number(last, "turn")) if last and last["run"] == run else 0

    def _note(self, run: str, number: int) -> None:
        self._state.config_records[STATE] = ConfigRecord({"run": run, "turn": number})


def slot_of(number: int) -> int:
    """Return the slot of an attempt at the round with this number."""
    return number % len(SLOTS)
