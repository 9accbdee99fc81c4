"""Description of a sweep, and its cells: run configurations, all validated before the first run starts."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cloister.config.io import Auto, Count, Scalar, Section, as_pairs, flatten, read_settings, read_toml
from cloister.config.run import RunConfig, parse, shown
from cloister.server.build import build
from cloister.server.preflight import share_needed
from cloister.server.prepare import prepare
from cloister.server.reports.status import run_state
from cloister.simulation.simulate import refuse_too_few
from cloister.utils.errors import BudgetExhausted, CloisterError, ConfigError, SettingsError
from cloister.utils.files import expanded

Seed = Annotated[int, Field(ge=0, lt=2**31)]
OF_THE_SWEEP = ("run-name",)
"""Keys that the sweep sets itself."""
OF_ALL_CELLS = (
    *("seed", "output-dir", "log-format"),
    *("privacy.max-epsilon", "privacy.target-delta", "privacy.data-identity", "privacy.ledger-dir"),
)
"""Keys that are equal in all cells: the places of results, and the budget, which belongs to the data."""
BUDGET = "privacy.max-epsilon"
"""Key of the budget. It affects only the end of a run: with a larger budget, finished cells stay finished."""
BY_CLIENTS = "site-budgets"
"""Name of the end of a run whose clients spent their budgets (`stopping.Ending`). Other cells can still run."""
State = Literal["absent", "done", "broken", "running"]


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
        self.description = given = read_toml(Description, path, str(path))
        self.name = given.name or re.sub(r"[^\w-]+", "-", path.stem)
        if isinstance(given.base, str):
            try:
                self.base = read_settings([str(path.parent / expanded(given.base))])
            except SettingsError as error:
                raise ConfigError(f"{path}: base = {given.base!r}: {str(error).partition(': ')[2]}") from None
        else:
            self.base = flatten(given.base)
        _refuse(path, "base", self.base, OF_THE_SWEEP)
        flat: Mapping[str, object] = flatten(given.grid)
        _refuse(path, "grid", flat, (*OF_THE_SWEEP, *OF_ALL_CELLS))
        grid: dict[str, list[Scalar]] = {}
        wrong = []
        for key, found in flat.items():
            listed = found if isinstance(found, list) else []
            grid[key] = [value for value in listed if isinstance(value, str | int | float | bool)]
            if not listed or len({repr(value) for value in grid[key]}) != len(listed):
                wrong.append(f"{path}: grid.{key} = {found!r} is not valid: it must be a list of different values")
        if wrong:
            raise ConfigError("\n".join(wrong))
        self.grid = grid
        own = self.base.get("seed", -1)
        if given.seeds is None:
            self.seeds: tuple[int, ...] = (own,) if isinstance(own, int) and own >= 0 else (0,)
        elif "seed" in self.base:
            raise ConfigError(
                f"{path}: base.seed = {own!r} has no effect with seeds = {given.seeds!r}; keep one of them"
            )
        else:
            self.seeds = tuple(range(given.seeds)) if isinstance(given.seeds, int) else tuple(given.seeds)
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"{path}: seeds = {given.seeds!r} is not valid: a seed is there twice")

    def settings(self) -> Iterator[dict[str, Scalar]]:
        """Yield the values of the grid's keys in each cell; the last key varies fastest."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))


def _refuse(path: Path, table: str, settings: Mapping[str, object], refused: tuple[str, ...]) -> None:
    found = [key for key in settings if key in refused]
    if found:
        why = (
            "the sweep names its runs" if found[0] in OF_THE_SWEEP else "it is the same in all cells: put it into base"
        )
        raise ConfigError(f"{path}: {table}.{found[0]} is not valid: {why}")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        settings: values of the grid's keys.
        config: of the run. Its name contains a hash of the number of clients and all settings except the budget, so
            that the same cell is found again.
        clients: number of simulated clients.
        hides_times: whether the duration of the run must stay secret.
    """

    settings: Mapping[str, Scalar]
    config: RunConfig
    clients: int
    hides_times: bool

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return self.config.run_name

    @property
    def directory(self) -> Path:
        """Return the directory of the run."""
        return expanded(self.config.output_dir).resolve() / self.name

    def state(self) -> State:
        """Return the state of the run.

        `done`: it has a result, also if its clients' budgets ended it. `running`: a process executes it. `broken`:
        it was killed, stopped or failed, or the budget that ended it has changed since.
        """
        if not self.directory.exists():
            return "absent"
        try:
            found = run_state(self.directory)
        except ConfigError:
            return "broken"
        if found.state == "running":
            return "running"
        if found.how != "budget":
            return "done" if found.how in ("as-asked", BY_CLIENTS) else "broken"
        content = json.loads((self.directory / "config.json").read_text())["config"]
        return "done" if content.get(BUDGET) == self.config.flat()[BUDGET] else "broken"

    def is_ended_by_clients(self) -> bool:
        """Return whether the budgets of the run's own clients ended it."""
        return self.directory.exists() and run_state(self.directory).how == BY_CLIENTS

    def __str__(self) -> str:
        return as_pairs(shown(self.settings) | {"seed": self.config.seed})


def cells_of(sweep: Sweep) -> tuple[Cell, ...]:
    """Return all cells of a sweep, each validated without its data.

    Args:
        sweep: as its file describes it.

    Raises:
        ConfigError: has a line for each fault, which names the cells.
    """
    cells, clients, select = list[Cell](), sweep.description.clients, sweep.description.select
    wrong: dict[str, list[str]] = {}
    for settings in sweep.settings():
        try:
            configs = []
            for seed in sweep.seeds:
                flat = {**sweep.base, **settings, "seed": seed}
                facts = {key: value for key, value in parse(flat).flat().items() if key != BUDGET} | {
                    "clients": clients
                }
                name = f"{sweep.name}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]}"
                configs.append(parse({**flat, "run-name": name}))
            # Validate one of them: seeds change no check.
            refuse_too_few(configs[0], clients)
            if select and configs[0].scores_centrally is False:
                raise ConfigError(
                    f"select = {select!r} needs evaluation.central and task.statistics = 'average': the choice is made "
                    "by scores on the server's own examples; by scores on the clients' it would release something "
                    "about them that no ledger holds"
                )
            hides_times = build(configs[0]).hides_times
            cells += [Cell(settings, config, clients, hides_times) for config in configs]
        except CloisterError as error:
            wrong.setdefault(str(error), []).append(" ".join(f"{key}={value!r}" for key, value in settings.items()))
    lines = []
    for message, labels in wrong.items():
        named, seeds = labels if len(labels) <= 2 else labels[:1], len(sweep.seeds)
        more = f" and {len(labels) - 1} more" if len(labels) > len(named) else ""
        runs = f" ({len(labels) * seeds} runs, with its {seeds} seeds)" if more and seeds > 1 else ""
        lines.append(f"cell {' and '.join(named) or 'base'}{more}{runs}: {message}")
    if lines:
        raise ConfigError("\n".join(lines))
    if len(cells) > 1 and any(cell.config.flat()["privacy.noise-multiplier"] == "auto" for cell in cells):
        raise ConfigError(
            "privacy.noise-multiplier = 'auto' lets the first run take all that privacy.max-epsilon has left, and "
            f"there are {len(cells)} runs; name multipliers (cloister plan --epsilon says which fit a part of it)"
        )
    return tuple(cells)


def refuse_past_budget(cells: Sequence[Cell]) -> None:
    """Refuse runs that together exceed the budget.

    Every run is charged, because all of them are released.

    Args:
        cells: that are to run.

    Raises:
        BudgetExhausted: their rounds cost more than the remaining budget.
    """
    together: dict[str, list[RunConfig]] = {}  # cells that differ only in their seeds cost the same
    for cell in cells:
        if cell.config.flat()[BUDGET]:
            together.setdefault(str(cell.settings), []).append(cell.config)
    needed = share_needed((prepare(same[0], pretrain=False), len(same)) for same in together.values())
    if needed > 1:
        raise BudgetExhausted(
            f"the {len(cells)} runs of the sweep need {needed:.3g} times what privacy.max-epsilon has left, as each of "
            "them is released; no run was started: use more noise, or fewer rounds, values or seeds"
        )
