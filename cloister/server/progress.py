"""State of a run after a round: everything that the next round depends on, written as one unit.

    checkpoints/round-00003.npz     the global model
    state-00003.npz                 moments, roles, draws, the best model …; absent without such state
    state.json                      written last: the number of the round to resume after

Each file is written completely or absent. The files of the previous round stay until `state.json` names the new one. So
one complete round survives a process that dies at any time. Arrays are read without pickle.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord
from numpy.typing import NDArray

from cloister.core.arrays import from_record
from cloister.core.errors import ConfigError
from cloister.core.files import read_npz, read_text, write_npz
from cloister.core.state import State, Stateful, joined, part
from cloister.server.attested import Attested
from cloister.server.build import Plan
from cloister.server.reports.rundir import RunDirectory
from cloister.server.stopping import EarlyStopping

VERSION = 1
FILE = "state.json"


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
            facts = json.loads(read_text(path))
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
