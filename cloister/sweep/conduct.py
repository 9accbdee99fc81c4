"""Execution of a sweep, from its file to its results."""

from collections.abc import Iterable
from pathlib import Path

from cloister.core.errors import ConfigError
from cloister.server.reports.compare.table import lines
from cloister.sweep.cells import Cell, cells_of, refuse_past_budget
from cloister.sweep.description import Sweep
from cloister.sweep.results import results_of, write_results
from cloister.sweep.runner import BUDGET, INTERRUPTED, Runner, Told, held

FAILED = 1
"""Exit code if a cell has no result."""


def conduct(path: Path, told: Told, only_check: bool = False) -> int:
    """Run the cells of a sweep that have no result yet, and write all results.

    Args:
        path: of the file that describes the sweep.
        told: receives lines for the user.
        only_check: validate the sweep and start nothing.

    Returns:
        0: every cell is done; 1: some failed; 3: a budget ended one; 130: the user stopped the sweep.

    Raises:
        CloisterError: a cell cannot run, or together they exceed their budget. Nothing was started.
    """
    sweep = Sweep(path)
    cells = cells_of(sweep)
    todo = _todo(cells)
    told(f"sweep {sweep.name}: {len(cells)} runs, {len(cells) - len(todo)} of them done before")
    refuse_past_budget(todo)
    if only_check:
        for cell in todo:
            told(f"  {cell.name}  {cell}")
        return 0
    folder = cells[0].directory.parent / f"{sweep.name}.sweep"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    jobs = sweep.description.jobs
    with held(folder):
        runner = Runner(folder, 0 if jobs == "auto" else jobs, told)
        runner.run(_todo(cells))
        found = results_of(sweep, cells)
        if found is not None:
            write_results(sweep, found, folder)
        for line in lines(found) if found is not None else ["no cell has a result"]:
            told(line)
        if found is not None:
            told(f"results  {folder}")
    codes = {ended.code for ended in runner.ended}
    if runner.stopped:
        return INTERRUPTED
    return FAILED if codes - {0, BUDGET} else BUDGET if BUDGET in codes else 0


def _todo(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells without a result.

    Raises:
        ConfigError: another process executes one of them.
    """
    states = {cell.name: cell.state() for cell in cells}
    if busy := [name for name, state in states.items() if state == "running"]:
        raise ConfigError(f"{busy[0]} is under way in another process; wait for its end, or stop it")
    return [cell for cell in cells if states[cell.name] != "done"]
