"""Cells of a sweep: run configurations, all validated before the first run starts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cloister.config.run import RunConfig, parse, shown
from cloister.config.section import Scalar
from cloister.config.settings import as_pairs
from cloister.core.errors import BudgetExhausted, CloisterError, ConfigError
from cloister.core.files import expanded
from cloister.local.simulation import refuse_too_few
from cloister.server.build import build
from cloister.server.prepare import prepare
from cloister.server.reports.status import run_state
from cloister.server.several import share_needed
from cloister.sweep.description import Sweep

BUDGET = "privacy.max-epsilon"
"""Key of the budget. It affects only the end of a run: with a larger budget, finished cells stay finished."""
State = Literal["absent", "done", "broken", "running"]


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

        `done`: it has a result. `running`: a process executes it. `broken`: it was killed, stopped or failed, or the
        budget that ended it has changed since.
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
            return "done" if found.how == "as-asked" else "broken"
        content = json.loads((self.directory / "config.json").read_text())["config"]
        return "done" if content.get(BUDGET) == self.config.flat()[BUDGET] else "broken"

    def __str__(self) -> str:
        return as_pairs(shown(self.settings) | {"seed": self.config.seed})


def cells_of(sweep: Sweep) -> tuple[Cell, ...]:
    """Return all cells of a sweep, each validated without its data.

    Args:
        sweep: as its file describes it.

    Raises:
        ConfigError: has a line for each fault, which names the cells.
    """
    cells: list[Cell] = []
    wrong: dict[str, list[str]] = {}
    for settings in sweep.settings():
        try:
            cells += _cells(sweep, settings)
        except CloisterError as error:
            wrong.setdefault(str(error), []).append(" ".join(f"{key}={value!r}" for key, value in settings.items()))
    if wrong:
        raise ConfigError(
            "\n".join(f"{_named(labels, len(sweep.seeds))}: {message}" for message, labels in wrong.items())
        )
    if len(cells) > 1 and any(cell.config.flat()["privacy.noise-multiplier"] == "auto" for cell in cells):
        raise ConfigError(
            "privacy.noise-multiplier = 'auto' lets the first run take all that privacy.max-epsilon has left, and "
            f"there are {len(cells)} runs; name multipliers (cloister plan --epsilon says which fit a part of it)"
        )
    return tuple(cells)


def _named(labels: Sequence[str], seeds: int) -> str:
    shown = labels if len(labels) <= 2 else labels[:1]
    more = f" and {len(labels) - 1} more" if len(labels) > len(shown) else ""
    runs = f" ({len(labels) * seeds} runs, with its {seeds} seeds)" if more and seeds > 1 else ""
    return f"cell {' and '.join(shown) or 'base'}{more}{runs}"


def _cells(sweep: Sweep, settings: Mapping[str, Scalar]) -> list[Cell]:
    """Return the cells of all seeds, and validate one of them: seeds change no check."""
    clients, select, configs = sweep.description.clients, sweep.description.select, []
    for seed in sweep.seeds:
        flat = {**sweep.base, **settings, "seed": seed}
        facts = {key: value for key, value in parse(flat).flat().items() if key != BUDGET} | {"clients": clients}
        name = f"{sweep.name}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]}"
        configs.append(parse({**flat, "run-name": name}))
    refuse_too_few(configs[0], clients)
    if select and configs[0].evaluation.central is False:
        raise ConfigError(
            f"select = {select!r} needs evaluation.central: the choice is made by scores on the server's own examples; "
            "by scores on the clients' it would release something about them that no ledger holds"
        )
    hides_times = build(configs[0]).hides_times
    return [Cell(settings, config, clients, hides_times) for config in configs]


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
