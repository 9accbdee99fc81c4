"""State that outlives a process: named arrays, and who declares to have any."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from numpy.typing import NDArray

State = Mapping[str, NDArray]
"""By name; numbers are arrays without dimensions."""
HOOKS = ("state_dict", "load_state_dict")
OURS = __name__.partition(".")[0]


@runtime_checkable
class Stateful(Protocol):
    """What goes on from round to round, and from process to process."""

    def state_dict(self) -> State:
        """Everything that the next round depends on and that the run configuration does not say."""

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned."""


def declares_state(value: object, hooks: tuple[str, str] = HOOKS) -> bool:
    """Whether a value says how it goes on in another process, and says it about itself.

    Hooks that are inherited speak for the class that has them, and not for what a subclass adds. Within Cloister
    classes are written with their subclasses in view; elsewhere each class that is to be resumed has hooks of its own.

    Args:
        value: a strategy, or anything else that a plugin can be.
        hooks: the names of the two methods.
    """
    for kind in type(value).__mro__:
        if vars(kind).keys() >= set(hooks):
            return True
        if kind.__module__.partition(".")[0] != OURS:
            return False
    return False


def joined(parts: Mapping[str, State]) -> dict[str, NDArray]:
    """Several states in one: array `name` of a part is called `part/name`."""
    return {f"{name}/{key}": array for name, state in parts.items() for key, array in state.items()}


def part(state: State, name: str) -> dict[str, NDArray]:
    """One of the states that `joined` was given; empty if it was.

    Args:
        state: as `joined` returned it.
        name: of the part.
    """
    prefix = f"{name}/"
    return {key.removeprefix(prefix): array for key, array in state.items() if key.startswith(prefix)}
