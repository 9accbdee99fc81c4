"""Plugins by name: a table of built-ins in the code, and entry points of installed packages.

The built-ins are listed in the code because a node that receives the app over the network has no entry points of
Cloister.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from cloister.core.crash import kind, place
from cloister.core.errors import PluginError


class Registry:
    """The plugins of one kind, loaded on first use.

    Args:
        kind: noun for a plugin of this registry, in the singular (for messages).
        group: the entry-point group of other packages.
        builtin: name -> "module:attribute".
    """

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str]) -> None:
        self.kind = kind
        self.group = group
        self._builtin = dict(builtin)

    @cached_property
    def _table(self) -> dict[str, str]:
        """Return every known name with its object's location.

        Raises:
            PluginError: two different objects claim one name.
        """
        table = dict(self._builtin)
        for point in entry_points(group=self.group):
            if table.setdefault(point.name, point.value) != point.value:
                raise PluginError(f"{self.kind} {point.name!r} is claimed twice: {table[point.name]} and {point.value}")
        return table

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        return sorted(self._table)

    def load(self, name: str) -> Any:
        """Load the object of a name.

        Raises:
            PluginError: the name is unknown, or its module does not import; the text names the type of error and its
                place.
        """
        table = self._table
        if name not in table:
            close = get_close_matches(name, table, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise PluginError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(table))}{meant}")
        try:
            return EntryPoint(name, table[name], self.group).load()
        except PluginError as error:  # of a base class of Cloister's, which names the class and the remedy
            raise PluginError(f"{self.kind} {name!r} ({table[name]}) does not load: {error}") from None
        except Exception as error:  # a plugin's module may raise anything, and its text may hold anything
            where = place(error)
            reason = kind(error) if "importlib" in where else f"{kind(error)} at {where}"
            raise PluginError(f"{self.kind} {name!r} ({table[name]}) does not load: {reason}") from error
