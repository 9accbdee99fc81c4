"""What stands between nodes and the functions of Flower's Fleet interface."""

from collections.abc import Callable
from typing import Any, ClassVar

from flwr.superlink.servicer.fleet import fleet_handlers


class InFront:
    """Methods that take the place of Flower's functions of the same names, which they call.

    Attributes:
        names: of those functions.
        inner: the functions by name, as they were when this was made.
    """

    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.inner: dict[str, Callable[..., Any]] = {name: vars(fleet_handlers)[name] for name in self.names}

    def install(self) -> None:
        """Put this in front of the functions."""
        for name in self.inner:
            vars(fleet_handlers)[name] = getattr(self, name)

    def remove(self) -> None:
        """Take it away again."""
        vars(fleet_handlers).update(self.inner)
