"""Pictures of findings. Matplotlib is imported on the first drawing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from numpy.typing import NDArray

from cloister.core.files import atomic_path

INCHES, LETTERS = 1.1, 17
"""Size of an image in a table of images, and letters in a line of its caption."""


def roc_picture(place: Path, curves: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[str, ...]:
    """Draw ROC curves on logarithmic scales.

    Args:
        place: of the file.
        curves: points (false alarms, hits) of each attack.

    Returns:
        The name of the file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    lowest = min(points[0][0] for points in curves.values())
    axes.plot([lowest, 1], [lowest, 1], color="grey", linestyle=":", label="a guess")
    for attack, points in curves.items():
        axes.plot(*np.transpose(points), label=attack)
    axes.set(xscale="log", yscale="log", xlabel="rate of false alarms", ylabel="members found", ylim=(lowest, 1.1))
    axes.legend()
    with atomic_path(place) as partial:
        figure.savefig(partial, dpi=150)
    return (place.name,)


def image_table(place: Path, rows: Mapping[str, Sequence[tuple[str, NDArray]]]) -> tuple[str, ...]:
    """Draw rows of grey images, each with a caption.

    Args:
        place: of the file.
        rows: by their names; images of shape (height, width), from 0 to 1.

    Returns:
        The name of the file.
    """
    from matplotlib.figure import Figure

    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(INCHES * columns + 1.2, (INCHES + 0.6) * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, images) in zip(grid, rows.items(), strict=True):
        for axes in line:
            axes.axis("off")
        for axes, (caption, image) in zip(line, images, strict=False):
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            axes.set_title(fill(caption, LETTERS), fontsize=7)
        line[0].text(-0.1, 0.5, fill(name, LETTERS), fontsize=7, ha="right", va="center", transform=line[0].transAxes)
    with atomic_path(place) as partial:
        figure.savefig(partial, dpi=150)
    return (place.name,)
