"""State that outlives a process, as named arrays, and the declaration of it."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from numpy.typing import NDArray

State = Mapping[str, NDArray]
"""Arrays by name; numbers are arrays without dimensions."""
HOOKS = ("state_dict", "load_state_dict")
OURS = __name__.partition(".")[0]


@runtime_checkable
class Stateful(Protocol):
    """An object with state between rounds and between processes."""

    def state_dict(self) -> State:
        """Return the state that the next round needs beyond the run configuration."""

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""


def declares_state(value: object, hooks: tuple[str, str] = HOOKS) -> bool:
    """Return True if the class of a value declares its own state.

    Inherited hooks declare the state of the class that defines them, without that of a subclass. Classes of Cloister
    are written with their subclasses in view. Elsewhere each resumable class needs hooks of its own.

    Args:
        value: a strategy, or another kind of plugin.
        hooks: the names of the two methods.
    """
    for kind in type(value).__mro__:
        if vars(kind).keys() >= set(hooks):
            return True
        if kind.__module__.partition(".")[0] != OURS:
            return False
    return False


def joined(parts: Mapping[str, State]) -> dict[str, NDArray]:
    """Return several states in one: array `name` of a part is named `part/name`."""
    return {f"{name}/{key}": array for name, state in parts.items() for key, array in state.items()}


def part(state: State, name: str) -> dict[str, NDArray]:
    """Return one of the states given to `joined`; empty if it was empty.

    Args:
        state: result of `joined`.
        name: of the part.
    """
    prefix = f"{name}/"
    return {key.removeprefix(prefix): array for key, array in state.items() if key.startswith(prefix)}
