"""Execution of a sweep, from its file to its results, as a comparison of its cells."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from cloister.config.run import shown
from cloister.server.reports.compare.comparison import Comparison, Group, compared, lines, markdown, record
from cloister.server.reports.compare.page import pictures, write_page, write_png
from cloister.server.reports.compare.runs import better, differing, read_runs
from cloister.sweep.cells import Cell, Sweep, cells_of, refuse_past_budget
from cloister.sweep.runner import BUDGET, Runner, Told, held
from cloister.utils.crash import INTERRUPTED
from cloister.utils.errors import ConfigError
from cloister.utils.files import atomic_path

FAILED = 1
"""Exit code if a cell has no result."""


def results_of(sweep: Sweep, cells: Sequence[Cell]) -> Comparison | None:
    """Compare the finished cells, grouped over their seeds; None without any.

    Args:
        sweep: as its file describes it.
        cells: all of its cells.
    """
    finished = [cell for cell in cells if cell.state() == "done"]
    if not finished:
        return None
    runs = {run.name: run for run in read_runs([cell.directory for cell in finished])}
    together: dict[str, list[Cell]] = {}  # cells with the same values of the grid
    for cell in cells:
        together.setdefault(repr(sorted(cell.settings.items())), []).append(cell)
    varied, select, groups = differing([cell.settings for cell in cells]), sweep.description.select, []
    for number, same in enumerate(together.values(), 1):
        settings = shown({key: same[0].settings[key] for key in varied})
        if those := tuple(runs[cell.name] for cell in same if cell.name in runs):
            groups.append(Group(str(number), settings, those))
    scores = {name for run in runs.values() for done in run.facts.rounds for name in done.central}
    found = compared(groups, select if select in scores else "")
    missing = len(cells) - len(finished)
    remarks = [f"Of {len(cells)} runs, {missing} have no result."] if missing else []
    if select:
        remarks.append(_chosen(found, select))
    return replace(found, heading="cell", remarks=tuple(remarks))


def best_of(comparison: Comparison, select: str) -> Group | None:
    """Return the group with the best final score on the server's own examples.

    None: there is none. Ties go to the smallest ε, if all ε are of the same kind, then to the first group. A group with
    a diverged run is excluded: the mean over its other runs would be biased upwards.

    Args:
        comparison: of the cells.
        select: the score; empty: none is selected.
    """

    def epsilon(group: Group) -> float:
        """Return the claimed ε of a group; ∞ if part of its cost is unbounded, and 0 if kinds of ε differ."""
        costs = (math.inf if cost.epsilon is None else cost.epsilon for cost in group.costs)
        return sum(costs) if len(comparison.kinds) == 1 else 0.0

    return min(_tied(comparison, select), key=epsilon, default=None)


def _tied(comparison: Comparison, select: str) -> list[Group]:
    """Return the groups with the best final score, in their order."""
    if not select or comparison.on_clients or select != comparison.score:
        return []
    finals = [(group.final(select, False), group) for group in comparison.groups]
    scored = [(final.mean, group) for final, group in finals if final and final.count == len(group.runs)]
    best = better(select, [mean for mean, _ in scored]) if scored else None
    return [group for mean, group in scored if mean == best]


def _chosen(comparison: Comparison, select: str) -> str:
    best = best_of(comparison, select)
    if comparison.on_clients or comparison.score != select:
        return f"No cell is chosen: no run has a score {select!r} on the server's own examples."
    if best is None:
        return f"No cell is chosen: of each, a run has no final {select}."
    chosen = (
        f"Chosen by the final {select} on the server's own examples: cell {best.name}, {comparison.labels[best.name]}."
    )
    tied = ", ".join(group.name for group in _tied(comparison, select) if group is not best)
    return f"{chosen} Equally good: {tied}; of these the smallest ε decides, then the order." if tied else chosen


def write_results(sweep: Sweep, comparison: Comparison, folder: Path) -> None:
    """Write `results.json`, `.md`, `.html` and `.png`.

    Args:
        sweep: of the results.
        comparison: of its cells.
        folder: that exists.

    Raises:
        ConfigError: a file cannot be written.
    """
    best = best_of(comparison, sweep.description.select)
    content = {"sweep": sweep.name, "selected": best.name if best else None, **record(comparison)}
    texts = {"results.json": json.dumps(content, indent=2) + "\n", "results.md": markdown(comparison)}
    try:
        for name, text in texts.items():
            with atomic_path(folder / name) as partial:
                partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    write_page(comparison, folder / "results.html", f"Sweep {sweep.name}")
    if pictures(comparison):
        write_png(comparison, folder / "results.png")


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
