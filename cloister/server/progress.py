"""Where a run stands after a round: everything that the next round depends on, on disk as one unit.

    checkpoints/round-00003.npz     the global model
    state-00003.npz                 moments, roles, draws, the best model …; absent where there is nothing of the kind
    state.json                      written last: names the round that a resumed run goes on from

Each file is whole or absent, and those of the round before stay until `state.json` names the new one. So a process that
dies at any instant leaves one round complete. Arrays are read without pickle.
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
    """Where a run stands after a round.

    Attributes:
        round: the last finished one; 0: the initial model.
        model: the global model after it.
        state: of everything that keeps some, joined.
    """

    round: int
    model: Mapping[str, NDArray]
    state: State

    @classmethod
    def of(cls, number: int, arrays: ArrayRecord, stateful: Mapping[str, Stateful]) -> "Progress":
        """Where a run stands now.

        Args:
            number: of the round that is finished.
            arrays: its global model.
            stateful: the objects that keep state from round to round, by name.
        """
        state = joined({name: one.state_dict() for name, one in stateful.items()})
        return cls(number, from_record(arrays), state)

    def save(self, directory: RunDirectory, keep: int) -> None:
        """Make this the round that the run would go on from; its checkpoint is written already.

        Args:
            directory: of the run.
            keep: how many of the newest checkpoints stay; 0: all.
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
        """Where the run of a directory stood; None: nothing was saved before it broke off.

        Raises:
            ConfigError: a file is not what `save` wrote.
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
        except Exception as error:  # what readers of archives raise has no common name
            raise ConfigError(f"resume: {path} and its checkpoint cannot be read: {type(error).__name__}") from None

    def restore(self, stateful: Mapping[str, Stateful]) -> None:
        """Let everything that keeps state go on from here.

        Args:
            stateful: of the same names as those it was made of.

        Raises:
            ConfigError: one does not say how, or what was saved is of another kind.
            LedgerError: the ledger does not hold the releases of the run.
        """
        for name, one in stateful.items():
            try:
                one.load_state_dict(part(self.state, name))
            except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
                raise ConfigError(
                    f"resume: what was saved of the run's {name} does not fit: {type(error).__name__}"
                ) from None


def stateful_objects(plan: Plan, stopping: EarlyStopping, attested: Attested) -> dict[str, Stateful]:
    """Everything of a run on the server that keeps state from round to round, by name.

    Args:
        plan: of the run.
        stopping: of its loop.
        attested: what nodes have stated.
    """
    roles: dict[str, Stateful] = {} if plan.held_out is None else {"roles": plan.held_out}
    return {"strategy": plan.strategy, "budget": plan.budget, "stopping": stopping, "attested": attested, **roles}


def _arrays_path(directory: RunDirectory, number: int) -> Path:
    return directory.path / f"state-{number:05d}.npz"
