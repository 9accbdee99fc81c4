"""Where a node keeps an attempt at a round of a secure aggregation from one message to the next.

Whoever takes an attempt has it alone: nobody finds it any more, until the next step was made and it is kept again. So
no step is made twice, however often, in whatever order and how many at a time a server asks for steps. Of a run two
attempts are kept at most: at a round, and an early one at the round after it.

| store | for | where |
|---|---|---|
| `MemoryStore` | nodes that one process plays | the memory of this process |
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
"""The record of the last turn that a node has taken in a run; it holds no secret."""
SLOTS = (0, 1)
"""Where attempts of a run are kept: those at even rounds, and those at odd ones."""


class Stage(IntEnum):
    """How far a node is in a round: in one of its two attempts, or with its update on the way in one of them."""

    EARLY = terms.EARLY
    ORDINARY = terms.ORDINARY
    VECTOR = 3


class Turn(NamedTuple):
    """A point up to which a node has gone in a run. Turns are ordered; a node takes each at most once.

    Args:
        round: number of the round.
        stage: of the round.
    """

    round: int
    stage: Stage

    @property
    def number(self) -> int:
        """This turn as one number, which is larger for every later turn."""
        return len(Stage) * self.round + self.stage

    @property
    def slot(self) -> int:
        """Where an attempt at this round is kept."""
        return slot_of(self.round)

    @property
    def ends(self) -> tuple[int, ...]:
        """The slots of attempts that are over with this turn: an early one lets the round before go on."""
        return (self.slot,) if self.stage == Stage.EARLY else SLOTS


class AttemptStore(ABC):
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
            for slot in turn.ends:
                self._put(run, slot, b"")
            last = self._last(run)
            if turn.number <= last:
                raise ProtocolError(f"this node has begun round {turn.round} of this run before, or a later one")
            if after is not None and after.number != last:
                raise ProtocolError(f"another attempt has begun since; this one at round {turn.round} is over")
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
            self._put(run, turn.slot, attempt)

    def take(self, run: str, number: int) -> bytes:
        """What is kept of an attempt, which nobody finds from then on; empty if there is none.

        Args:
            run: which run.
            number: of the round.

        Raises:
            ProtocolError: what is there is not what this store has put there.
        """
        slot = slot_of(number)
        with self._alone():
            attempt = self._get(run, slot)
            self._put(run, slot, b"")
        return attempt

    @abstractmethod
    def _alone(self) -> AbstractContextManager[None]:
        """The block, in which nobody else works on what is kept."""

    @abstractmethod
    def _get(self, run: str, slot: int) -> bytes:
        """The attempt in a slot; empty if there is none."""

    @abstractmethod
    def _put(self, run: str, slot: int, attempt: bytes) -> None:
        """Put this attempt into a slot, for the one that is there; empty: none."""

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
    """What a process remembers of a node, by slot."""

    kept: tuple[_Kept, ...] = (_Kept(),) * len(SLOTS)


_memories: dict[int, _Memory] = {}
"""By the identity of the state of a node."""
_remembering = threading.Lock()


class MemoryStore(AttemptStore):
    """In the memory of this process, for as long as the node's state is there; for one run.

    Args:
        state: of the node, in which it keeps the number of the last turn, and no secret.
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
    """Where an attempt at the round with this number is kept."""
    return number % len(SLOTS)
