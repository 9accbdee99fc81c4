"""What stands between nodes, or the server's app, and the functions of Flower's SuperLink."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from cloister.flower.superlink import fleet_handlers


class InFront:
    """Methods that take the place of Flower's functions of the same names, which they call.

    Attributes:
        handlers: Flower's module of those functions.
        names: of those functions.
        inner: the functions by name, as they were when this was made.
    """

    handlers: ClassVar[ModuleType] = fleet_handlers
    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.inner: dict[str, Callable[..., Any]] = {name: vars(self.handlers)[name] for name in self.names}

    def install(self) -> None:
        """Put this in front of the functions."""
        for name in self.inner:
            vars(self.handlers)[name] = getattr(self, name)
