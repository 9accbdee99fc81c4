"""What a sweep came to: its cells beside each other, by the code that compares runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cloister.core.errors import ConfigError
from cloister.core.files import atomic_path
from cloister.server.reports.compare.comparison import Comparison, Group, compared, differing
from cloister.server.reports.compare.figures import pictures, write_png
from cloister.server.reports.compare.page import write_page
from cloister.server.reports.compare.record import record
from cloister.server.reports.compare.runs import SMALLER, RunSummary, read_runs
from cloister.server.reports.compare.table import markdown
from cloister.sweep.cells import Cell
from cloister.sweep.description import Sweep


def results_of(sweep: Sweep, cells: Sequence[Cell]) -> Comparison | None:
    """The cells that are done, those that differ in their seeds together; None if there is none.

    Args:
        sweep: as its file describes it.
        cells: all of its cells.
    """
    done = [cell for cell in cells if cell.state() == "done"]
    if not done:
        return None
    runs = {run.name: run for run in read_runs([cell.directory for cell in done])}
    found = _compared(_groups(cells, runs), sweep.description.select)
    missing = len(cells) - len(done)
    remarks = [f"Of {len(cells)} runs, {missing} have no result."] if missing else []
    if sweep.description.select:
        remarks.append(_chosen(found, sweep.description.select))
    return replace(found, heading="cell", remarks=tuple(remarks))


def _compared(groups: Sequence[Group], select: str) -> Comparison:
    """Compared by the score to choose by, if any run has it."""
    scores = {name for group in groups for run in group.runs for done in run.facts.rounds for name in done.central}
    return compared(groups, select if select in scores else "")


def _groups(cells: Sequence[Cell], runs: dict[str, RunSummary]) -> list[Group]:
    """Cells with the same values of the grid, numbered."""
    together: dict[str, list[Cell]] = {}
    for cell in cells:
        together.setdefault(repr(sorted(cell.settings.items())), []).append(cell)
    varied = differing([cell.settings for cell in cells])
    groups = []
    for number, same in enumerate(together.values(), 1):
        settings = {key: same[0].settings[key] for key in varied}
        if those := tuple(runs[cell.name] for cell in same if cell.name in runs):
            groups.append(Group(str(number), settings, those))
    return groups


def best_of(comparison: Comparison, select: str) -> Group | None:
    """The group with the best final score on the server's own examples; None where there is none.

    One of which a run has diverged is not chosen: the mean over its other runs is that of the lucky ones.

    Args:
        comparison: of the cells.
        select: the score; empty: none is wanted.
    """
    if not select or comparison.on_clients or select != comparison.score:
        return None
    finals = [(group.final(select, False), group) for group in comparison.groups]
    scored = [(final.mean, group) for final, group in finals if final and final.count == len(group.runs)]
    sign = -1 if select in SMALLER else 1
    return max(scored, key=lambda pair: sign * pair[0])[1] if scored else None


def _chosen(comparison: Comparison, select: str) -> str:
    best = best_of(comparison, select)
    if comparison.on_clients or comparison.score != select:
        return f"No cell is chosen: no run has a score {select!r} on the server's own examples."
    if best is None:
        return f"No cell is chosen: of each, a run has no final {select}."
    return (
        f"Chosen by the final {select} on the server's own examples: cell {best.name}, {comparison.labels[best.name]}."
    )


def write_results(sweep: Sweep, comparison: Comparison, folder: Path) -> None:
    """Write `results.json`, `.md`, `.html` and `.png`.

    Args:
        sweep: that they are of.
        comparison: of its cells.
        folder: that is there.

    Raises:
        ConfigError: one of them cannot be written.
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
