"""File format of a sweep: a base configuration, the keys of a grid, and seeds."""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cloister.config.errors import read_toml
from cloister.config.run import flatten
from cloister.config.section import Auto, Count, Scalar, Section
from cloister.config.settings import read_settings
from cloister.core.errors import ConfigError, SettingsError
from cloister.core.files import expanded

Seed = Annotated[int, Field(ge=0, lt=2**31)]
OF_THE_SWEEP = ("run-name",)
"""Keys that the sweep sets itself."""
OF_ALL_CELLS = (
    *("seed", "output-dir", "log-format"),
    *("privacy.max-epsilon", "privacy.target-delta", "privacy.data-identity", "privacy.ledger-dir"),
)
"""Keys that are equal in all cells: the places of results, and the budget, which belongs to the data."""


class Description(Section):
    """Keys of the file.

    Attributes:
        name: of the sweep, and prefix of its runs' names; empty: the name of the file.
        clients: number of simulated clients in each run.
        jobs: number of cells that run at a time; `auto`: two, if memory allows.
        seeds: a list, or a number of seeds from 0 on; None: the seed of the base, or 0.
        select: the score that selects the best cell; empty: no selection.
        base: keys of the run configuration, or the path of a TOML file with them.
        grid: keys of the run configuration, with a list of values each.
    """

    name: Annotated[str, Field(pattern=r"^[\w-]*$")] = ""
    clients: Count = 4
    jobs: Annotated[int, Field(gt=0, le=64)] | Auto = "auto"
    seeds: Annotated[int, Field(gt=0, le=1000)] | Annotated[list[Seed], Field(min_length=1)] | None = None
    select: str = ""
    base: str | dict[str, object] = Field(default_factory=dict)
    grid: dict[str, object] = Field(default_factory=dict)


class Sweep:
    """Sweep that a file describes.

    Args:
        path: of the file.

    Raises:
        ConfigError: the file cannot be read, or has invalid keys, which the message names.

    Attributes:
        description: its keys.
        name: of the sweep.
        base: dotted keys that all cells share.
        grid: values by dotted key.
        seeds: of each cell.
    """

    def __init__(self, path: Path) -> None:
        self.description = read_toml(Description, path, str(path))
        self.name = self.description.name or re.sub(r"[^\w-]+", "-", path.stem)
        self.base = _base(self.description.base, path)
        self.grid = _grid(self.description.grid, path)
        self.seeds = self._seeds(path)

    def _seeds(self, path: Path) -> tuple[int, ...]:
        given, own = self.description.seeds, self.base.get("seed", -1)
        if given is None:
            return (own,) if isinstance(own, int) and own >= 0 else (0,)
        if "seed" in self.base:
            raise ConfigError(f"{path}: base.seed = {own!r} has no effect with seeds = {given!r}; keep one of them")
        seeds = tuple(range(given)) if isinstance(given, int) else tuple(given)
        if len(set(seeds)) < len(seeds):
            raise ConfigError(f"{path}: seeds = {given!r} is not valid: a seed is there twice")
        return seeds

    def settings(self) -> Iterator[dict[str, Scalar]]:
        """Yield the values of the grid's keys in each cell; the last key varies fastest."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))


def _base(given: str | Mapping[str, object], path: Path) -> dict[str, Scalar]:
    if isinstance(given, Mapping):
        base = flatten(given)
    else:
        try:
            base = read_settings([str(path.parent / expanded(given))])
        except SettingsError as error:
            raise ConfigError(f"{path}: base = {given!r}: {str(error).partition(': ')[2]}") from None
    _refuse(path, "base", base, OF_THE_SWEEP)
    return base


def _grid(given: Mapping[str, object], path: Path) -> dict[str, list[Scalar]]:
    flat: Mapping[str, object] = flatten(given)
    _refuse(path, "grid", flat, (*OF_THE_SWEEP, *OF_ALL_CELLS))
    grid = {key: _values(values) for key, values in flat.items()}
    wrong = [
        f"{path}: grid.{key} = {flat[key]!r} is not valid: it must be a list of different values"
        for key, values in grid.items()
        if not values
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return grid


def _values(found: object) -> list[Scalar]:
    """Return the values of a key; empty if they are not a list of different scalars."""
    listed = found if isinstance(found, list) else []
    values = [value for value in listed if isinstance(value, str | int | float | bool)]
    different = len({repr(value) for value in values}) == len(listed)
    return values if different else []


def _refuse(path: Path, table: str, settings: Mapping[str, object], refused: tuple[str, ...]) -> None:
    found = [key for key in settings if key in refused]
    if found:
        why = (
            "the sweep names its runs" if found[0] in OF_THE_SWEEP else "it is the same in all cells: put it into base"
        )
        raise ConfigError(f"{path}: {table}.{found[0]} is not valid: {why}")
