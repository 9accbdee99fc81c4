"""Figures of a comparison, and its HTML page in the frame of a run's report."""

from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister.server.reports.compare.comparison import LABEL, Comparison, fitting
from cloister.server.reports.html.figures import FIRST, FOURTH, SECOND, THIRD, Picture, drawing, pictured, thinned
from cloister.server.reports.html.page import short
from cloister.server.reports.html.templates import filled
from cloister.utils.errors import ConfigError
from cloister.utils.files import atomic_path
from cloister.utils.text import at_most, clean, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_COLOURS = (FIRST, SECOND, THIRD, FOURTH)
PRINT_COLOURS = ("#1f5fae", "#a8480f", "#1c7a48", "#7a3fa0")
MARKS = ("o", "s", "^", "D", "v", "P")
STYLES = ("-", "--", ":", "-.")
DESCRIBED = 12
"""Number of groups that a description lists by name."""
BAND = 0.15
"""Opacity of the band of one deviation around a mean."""
Draw = partial[None]
"""Function that draws on axes, in `colours`."""


def pictures(comparison: Comparison) -> tuple[Picture, ...]:
    """Return the non-empty figures for the HTML page."""
    with drawing():
        return tuple(
            pictured(name, title, told, (4.6, _height(comparison)), partial(draw, colours=PAGE_COLOURS))
            for name, title, told, draw in _wanted(comparison)
        )


def write_png(comparison: Comparison, path: Path) -> None:
    """Write the figures, side by side, as a PNG file.

    Args:
        comparison: of runs.
        path: of the file; its folder must exist.

    Raises:
        ConfigError: no run has a score, or the file cannot be written.
    """
    wanted = _wanted(comparison)
    if not wanted:
        raise ConfigError(f"{path}: no run has a score, so that there is nothing to draw")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(wanted), _height(comparison) + 0.6))
    try:
        with rc_context({"text.parse_math": False}):  # a name may contain `$`
            for place, (_, title, _, draw) in enumerate(wanted, 1):
                draw(figure.add_subplot(1, len(wanted), place, title=title), colours=PRINT_COLOURS)
            figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _wanted(comparison: Comparison) -> list[tuple[str, str, str, Draw]]:
    """Return name, title, description and drawing function of each figure.

    Each task has figures of its own.
    """
    tasks = comparison.tasks
    if len(tasks) == 1:
        return _of_one_task(comparison)
    return [
        (f"{name}-{number}", f"{title}, {clean(task)}", told, draw)
        for number, task in enumerate(tasks, start=1)
        for name, title, told, draw in _of_one_task(comparison.about(task))
    ]


def _of_one_task(comparison: Comparison) -> list[tuple[str, str, str, Draw]]:
    score, groups = clean(comparison.score), comparison.groups
    found: list[tuple[str, str, str, Draw]] = []

    def described(told: Sequence[str]) -> str:
        more = len(told) - DESCRIBED
        return "; ".join(told[:DESCRIBED]) + (f"; and {more} more, in the table." if more > 0 else ".")

    if any(group.curve(comparison.score, comparison.on_clients) for group in groups):
        finals = [(group.name, group.final(comparison.score, comparison.on_clients)) for group in groups]
        told = [f"{_label(comparison, name)}: {final.text() if final else 'none'} at the end" for name, final in finals]
        title = f"{score[:1].upper()}{score[1:]} by round"
        found.append(("rounds", title, described(told), partial(_curves, comparison)))
    if points := comparison.points():
        told = [
            f"{_label(comparison, name)}: {final.text()} at ε = {at_most(epsilon)}"
            for name, (epsilon, final) in points.items()
        ]
        found.append(("epsilon", f"Final {score} by ε", described(told), partial(_points, comparison)))
    return found


def _height(comparison: Comparison) -> float:
    """Return the height in inches, with a legend line for each group."""
    return 2.9 + 0.16 * len(comparison.groups)


def _looks(colours: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Return the style of each group: colours vary first, then lines and marks."""
    found = [
        {"color": colour, "linestyle": style, "marker": mark}
        for (mark, style), colour in product(zip((*MARKS, *MARKS), STYLES * 3, strict=True), colours)
    ]
    return [found[number % len(found)] for number in range(count)]


def _curves(comparison: Comparison, axes: "Axes", colours: Sequence[str]) -> None:
    looks = _looks(colours, len(comparison.groups))
    for group, look in zip(comparison.groups, looks, strict=True):
        curve = group.curve(comparison.score, comparison.on_clients)
        numbers = thinned(sorted(curve))
        means = [curve[number].mean for number in numbers]
        axes.plot(
            numbers,
            means,
            linewidth=1.5,
            markersize=3,
            markevery=max(1, len(numbers) // 10),
            label=_label(comparison, group.name),
            **look,
        )
        low = [curve[number].mean - (curve[number].std or 0.0) for number in numbers]
        high = [curve[number].mean + (curve[number].std or 0.0) for number in numbers]
        if low != high:
            axes.fill_between(numbers, low, high, color=look["color"], alpha=BAND, linewidth=0)
    axes.set(xlabel="round", ylabel=clean(comparison.score))
    axes.locator_params(axis="x", integer=True)
    _finish(axes)


def _points(comparison: Comparison, axes: "Axes", colours: Sequence[str]) -> None:
    points, looks = comparison.points(), _looks(colours, len(comparison.groups))
    for group, look in zip(comparison.groups, looks, strict=True):
        if group.name in points:
            epsilon, final = points[group.name]
            options = look | {
                "linestyle": "none",
                "markersize": 5,
                "capsize": 3,
                "label": _label(comparison, group.name),
            }
            axes.errorbar([epsilon], [final.mean], yerr=None if final.std is None else [final.std], **options)
    axes.set(xlabel=f"ε ({comparison.kinds[0].unit}, {comparison.kinds[0].relation})", ylabel=clean(comparison.score))
    axes.set_xlim(left=0)
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.grid(True, linewidth=0.6)
    axes.legend(fontsize=6.5, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.2), borderaxespad=0)
    axes.figure.set_layout_engine("constrained")


def _label(comparison: Comparison, name: str) -> str:
    return short(clean(comparison.labels[name]), LABEL)


def write_page(comparison: Comparison, path: Path, title: str = "") -> None:
    """Write a comparison as an HTML file.

    Args:
        comparison: of runs.
        path: of the file; its folder must exist.
        title: of the page; empty: a title with the number of runs.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = rendered(comparison, title)
    try:
        with atomic_path(path) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def rendered(comparison: Comparison, title: str = "") -> str:
    """Return the page as HTML.

    Args: as `write_page`.
    """
    tasks = sorted({str(run.facts.config.get("task.name")) for run in comparison.runs})
    count, (table, settings) = len(comparison.runs), fitting(comparison)
    context = {
        "title": title or f"Comparison of {counted(count, 'run')}",
        "about": f"{counted(count, 'run')} of {', '.join(tasks)}",
        "table": table,
        "settings": settings,
        "notes": comparison.notes,
        "pictures": pictures(comparison),
    }
    return filled((files(__package__) / "page.html.jinja").read_text(encoding="utf-8"), context)
