"""Figures of a run as elements of an HTML page, drawn by matplotlib, which is imported only after the run."""

import html
import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from cloister.server.reports.html.data import RoundFacts, Scores
from cloister.tasks.scores import RATES, Classification, RocCurve
from cloister.utils.text import at_most, clean, parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Mapping[str, str] = {
    "#010101": "var(--ink)",
    "#020202": "var(--line)",
    "#030303": "var(--series-1)",
    "#040404": "var(--series-2)",
    "#050505": "var(--series-3)",
    "#060606": "var(--series-4)",
}
"""Placeholder colours of figures, and the page's CSS colours that replace them in both colour schemes."""
INK, LINE, FIRST, SECOND, THIRD, FOURTH = COLOURS
_TAG = re.compile(r"<[^>]*>")
_NOT_SHOWN = re.compile(r"<(style|metadata)\b.*?</\1>|<!--.*?-->", re.DOTALL)
_ID = re.compile(r'(\bid="|\bhref="#|url\(#)')
POINTS = 400
"""Maximum points of a curve; more would be invisible and enlarge the page."""
SHADES = 12
"""Shades of the confusion matrix. Each is one path, so that more classes do not enlarge the page."""
DARKEST = 0.5
"""Opacity of a cell with its whole row. A number on it keeps a contrast of 4.5 to 1 in both colour schemes."""
COUNTED = 12
"""Maximum number of classes for which the cells of the matrix show numbers."""
NAME_WIDTH = 14
"""Maximum characters of a class's name in one line beside the matrix."""
NAME_LINES = {6: 4, 12: 2}
"""Maximum lines of a name, by the largest number of classes to which it applies; one for more classes."""
SIDE = 48
"""Maximum characters of the names below the matrix, side by side."""
DRAWN = 10
"""Maximum number of ROC curves of classes in one figure."""
FROM_ZERO = ("epsilon", "noise", "clip")
"""Figures whose axis begins at 0, so that a constant looks constant."""
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cloister",
    "text.parse_math": False,
    "font.size": 9.0,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Settings of matplotlib without embedded fonts, random ids or formulas in text."""


def inlined(svg: str, name: str, title: str, description: str) -> str:
    """Return a figure as an element of an HTML page.

    Args:
        svg: a complete document, as matplotlib writes it; its texts are escaped.
        name: of the figure, unique on the page, so that all ids are unique.
        title: content of the figure.
        description: the data of the figure in words, for screen readers.

    Returns:
        An `svg` element without namespaces and styles of its own.
    """

    def adapted(found: re.Match[str]) -> str:
        tag = _ID.sub(rf"\1{name}-", found.group().replace("xlink:", ""))
        for placeholder, colour in COLOURS.items():
            tag = tag.replace(placeholder, colour)
        return tag

    _, opening, rest = svg.partition("<svg")
    attributes, _, body = rest.partition(">")
    box = attributes.partition('viewBox="')[2].partition('"')[0]
    return (
        f'{opening} viewBox="{box}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-desc">{html.escape(description)}</desc>'
        f"{_TAG.sub(adapted, _NOT_SHOWN.sub('', body))}"
    )


@dataclass(frozen=True)
class Picture:
    """One figure of the page.

    Attributes:
        title: content of the figure; also its caption.
        description: the data of the figure, in words.
        svg: an SVG element with both.
    """

    title: str
    description: str
    svg: str


@dataclass(frozen=True)
class _Curve:
    name: str
    label: str
    points: Mapping[int, float]
    of_clients: bool = False


def curves(rounds: Sequence[RoundFacts]) -> tuple[Picture, ...]:
    """Return figures of scores, loss, ε, noise and clipping norm by round.

    Args:
        rounds: of the run, from round 0 on.
    """
    wanted = (
        ("scores", "", _scores(rounds, lambda name: name != "loss")),
        ("loss", "", _scores(rounds, lambda name: name == "loss")),
        ("epsilon", "ε of the ledger by round", _measured(rounds, "epsilon", "ε")),
        ("noise", "Noise on a weight by round: standard deviation", _measured(rounds, "noise_std", "noise")),
        ("clip", "Clip by round: largest norm of an update", _measured(rounds, "clipping_norm", "clip")),
    )
    pictures = []
    with drawing():
        for name, title, found in wanted:
            if found:
                names = ", ".join(dict.fromkeys(curve.name for curve in found))
                title = title or f"{names[0].upper()}{names[1:60]} by round"
                draw = partial(_lines, found=found, from_zero=name in FROM_ZERO)
                pictures.append(pictured(name, title, " ".join(map(_told, found)), (3.1, 1.8), draw))
    return tuple(pictures)


def confusion(found: Classification) -> Picture:
    """Return the confusion matrix: true classes in rows, predicted in columns.

    Args:
        found: of the kept model.
    """
    hits = sum(row[number] for number, row in enumerate(found.confusion))
    total = sum(map(sum, found.confusion))
    mistaken = (
        (count, row, column)
        for row, counts in enumerate(found.confusion)
        for column, count in enumerate(counts)
        if row != column
    )
    count, row, column = max(mistaken, default=(0, 0, 0))
    worst = "Nothing was mistaken for anything else."
    if count:
        worst = f"Most often class {found.classes[row].name} was taken for {found.classes[column].name}: {count} times."
    told = f"{hits} of {total} examples lie on the diagonal, where the prediction is right. {worst}"
    with drawing():
        return pictured("confusion", "Confusion matrix", told, (4.4, 4.0), partial(_matrix, found=found))


def roc(found: Sequence[RocCurve]) -> Picture:
    """Return the ROC curves of classes, each against the others, and their macro average.

    The average is the mean share of found examples at equal shares of false alarms. Like the AUC on the page, curves
    are of the server's own test examples alone; no claim covers these.

    Args:
        found: of the kept model, one curve at least; of many, those of the smallest area are drawn.
    """
    shown = sorted(found, key=lambda curve: curve.auc)[:DRAWN]
    drawn = [curve for curve in found if curve in shown]
    mean = RocCurve(
        "macro average",
        sum(curve.auc for curve in found) / len(found),
        tuple(sum(shares) / len(found) for shares in zip(*(curve.found for curve in found), strict=True)),
    )
    title = "ROC curve of each class against the others"
    if len(found) == 1:
        title = f"ROC curve of {clean(found[0].name)}"
    elif len(found) > DRAWN:
        title += f": the {DRAWN} of smallest area of {len(found)}"
    told = ", ".join(f"{curve.name} {curve.auc:.3f}" for curve in (*drawn, *([mean] if len(found) > 1 else [])))
    with drawing():
        draw = partial(_roc, drawn=drawn, mean=mean if len(found) > 1 else None)
        return pictured("roc", title, f"Area under the curve: {told}.", (4.4, 2.6), draw)


def most_confused_with(found: Classification, number: int) -> str:
    """Return the class that a class is most often mistaken for, with the count.

    The text is empty without mistakes.

    Args:
        found: of the kept model.
        number: of the class.
    """
    others = [(count, other) for other, count in enumerate(found.confusion[number]) if other != number]
    count, other = max(others, key=lambda pair: (pair[0], -pair[1]), default=(0, 0))
    return f"{found.classes[other].name} ({count})" if count else ""


@contextmanager
def drawing() -> Iterator[None]:
    """Apply the settings of figures in the block, and silence font messages."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from matplotlib import rc_context

        with rc_context(SETTINGS):
            yield
    finally:
        logger.setLevel(level)


def _scores(rounds: Sequence[RoundFacts], wanted: Callable[[str], bool]) -> list[_Curve]:
    def on(part: Callable[[RoundFacts], Scores], suffix: str, of_clients: bool) -> list[_Curve]:
        names = dict.fromkeys(name for done in rounds for name in part(done) if wanted(name))
        found = {name: {done.number: part(done)[name] for done in rounds if name in part(done)} for name in names}
        return [_Curve(clean(name), clean(name) + suffix, points, of_clients) for name, points in found.items()]

    return [
        *on(lambda done: done.central, ", server's test data", False),
        *on(lambda done: done.federated, ", clients' data", True),
    ]


def _measured(rounds: Sequence[RoundFacts], name: str, label: str) -> list[_Curve]:
    points = {done.number: done.measured[name] for done in rounds if name in done.measured}
    return [_Curve(label, label, points)] if points else []


def _told(curve: _Curve) -> str:
    numbers = sorted(curve.points)
    first, last = numbers[0], numbers[-1]
    low, high = (choose(curve.points, key=lambda number: curve.points[number]) for choose in (min, max))
    label = f"{curve.label[0].upper()}{curve.label[1:]}"
    shown = {
        number: at_most(curve.points[number]) if "ε" in curve.label else f"{curve.points[number]:.4g}"
        for number in (first, last, low, high)
    }
    return (
        f"{label}: {shown[first]} at round {first}, {shown[last]} at round {last}; "
        f"smallest {shown[low]} at round {low}, largest {shown[high]} at round {high}."
    )


def _lines(axes: "Axes", found: list[_Curve], from_zero: bool) -> None:
    axes.figure.subplots_adjust(0.15, 0.25, 0.98, 0.95)  # fixed margins: measuring labels doubles the time
    seen: dict[bool, int] = {False: 0, True: 0}
    for curve in found:
        numbers = thinned(sorted(curve.points))
        marker = "." if len(numbers) <= 60 else ""
        axes.plot(
            numbers,
            [curve.points[number] for number in numbers],
            color=SECOND if curve.of_clients else FIRST,
            linestyle=("-", "--", ":", "-.")[seen[curve.of_clients] % 4],
            linewidth=1.6,
            marker=marker,
            label=curve.label,
        )
        seen[curve.of_clients] += 1
    axes.set_xlabel("round")
    axes.locator_params(axis="x", integer=True)
    axes.grid(True, linewidth=0.6)
    if from_zero:
        axes.set_ylim(bottom=0)
    if len(found) > 1:
        axes.legend(fontsize=7.5, frameon=False, labelcolor=INK)


def thinned(numbers: Sequence[int], most: int = POINTS) -> list[int]:
    """Return at most `most` of the numbers, evenly spaced, with both ends.

    Args:
        numbers: of rounds, in their order.
        most: maximum number, above 1.
    """
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(place * (len(numbers) - 1) / (most - 1))] for place in range(most)]


def _matrix(axes: Any, found: Classification) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2D

    axes.figure.set_layout_engine("tight")  # names of classes have any length
    names, size = [scored.name for scored in found.classes], len(found.classes)
    shaded: dict[int, list[tuple[int, int]]] = {}  # shade, the share of a cell in its row -> non-empty cells
    for row, counts in enumerate(found.confusion):
        for column, count in enumerate(counts):
            if count:
                shaded.setdefault(-(-SHADES * count // sum(counts)), []).append((row, column))
    for shade, cells in sorted(shaded.items()):
        places = [Affine2D().translate(column - 0.5, row - 0.5) for row, column in cells]
        squares = [Path.unit_rectangle().transformed(place) for place in places]
        patch = Path.make_compound_path(*squares)
        axes.add_patch(PathPatch(patch, facecolor=FIRST, edgecolor="none", alpha=DARKEST * shade / SHADES))
    if size <= COUNTED:
        for row, counts in enumerate(found.confusion):
            for column, count in enumerate(counts):
                axes.text(column, row, str(count) if count else "·", ha="center", va="center", fontsize=7.5)
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), xlabel="predicted", ylabel="true", aspect="equal")
    step = max(1, -(-size // 20))
    lines = next((room for most, room in NAME_LINES.items() if size <= most), 1)
    labels = [_wrapped(name, lines) for name in names[::step]]
    widest = max(len(line) for label in labels for line in label.split("\n"))
    axes.set_xticks(range(0, size, step), labels, rotation=90 if widest * len(labels) > SIDE else 0)
    axes.set_yticks(range(0, size, step), labels)
    axes.tick_params(labelsize=7.5, length=2)


def _roc(axes: "Axes", drawn: Sequence[RocCurve], mean: RocCurve | None) -> None:
    axes.figure.subplots_adjust(0.11, 0.17, 0.61, 0.97)  # the legend has the rest
    axes.plot((0, 1), (0, 1), color=LINE, linewidth=0.8)
    looks: list[tuple[RocCurve, str, str, float]] = [
        (curve, (FIRST, SECOND, THIRD, FOURTH)[place % 4], ("-", "--", ":")[place // 4], 1.2)
        for place, curve in enumerate(drawn)
    ]
    for curve, colour, style, width in looks if mean is None else [*looks, (mean, INK, "-", 2.0)]:
        label = f"{_wrapped(curve.name, 1)} {curve.auc:.3f}"
        axes.plot((0, *RATES), (0, *curve.found), color=colour, linestyle=style, linewidth=width, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="share of false alarms", ylabel="share found")
    axes.grid(True, linewidth=0.6)
    axes.legend(
        title="area", loc="upper left", bbox_to_anchor=(1.02, 1.02), fontsize=7.5, frameon=False, labelcolor=INK
    )


def _wrapped(name: str, lines: int) -> str:
    """Return a name in at most `lines` lines, truncated if it is longer."""
    found = [""]
    for part in parts(clean(name)):
        for piece in wrap(part, NAME_WIDTH, drop_whitespace=False):
            if found[-1] and len(found[-1] + piece.rstrip()) > NAME_WIDTH:
                found.append("")
            found[-1] += piece
    whole, last = [line.strip() for line in found[:lines]], found[lines - 1 : lines]
    return "\n".join([*whole[:-1], f"{last[0][: NAME_WIDTH - 1].rstrip()}…"] if found[lines:] else whole)


def pictured(
    name: str, title: str, description: str, inches: tuple[float, float], draw: Callable[["Axes"], None]
) -> Picture:
    """Draw one pair of axes as SVG.

    It avoids pyplot, which would keep the figure and require a display.

    Args:
        name: of the figure, unique on the page.
        title: content of the figure.
        description: the data of the figure, in words.
        inches: width and height.
        draw: draws the content on the axes.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches)
    draw(figure.add_subplot())
    written = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(written, metadata=nothing)
    described = clean(description)
    return Picture(title, described, inlined(written.getvalue(), name, title, described))
