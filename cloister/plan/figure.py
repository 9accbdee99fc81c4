"""Plot of ε by round."""

import math
import textwrap
from itertools import count
from pathlib import Path

from cloister.core.errors import ConfigError
from cloister.plan.preview import Preview
from cloister.plan.words import title

WIDE = 50.0
"""Ratio of two curves' last values above which the scale is logarithmic."""


def draw(preview: Preview, path: Path) -> None:
    """Write the curves of a preview as a PNG file.

    Args:
        preview: of a run.
        path: of the file, in an existing folder.

    Raises:
        ConfigError: there is no curve, or the file cannot be written.
    """
    if not preview.series:
        raise ConfigError(f"--png {path}: no ε is claimed for this run, so that there is no curve to draw")
    # A separate canvas avoids pyplot, and with it any graphical backend.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    # Markers of several sizes keep equal curves visible.
    for size, series in zip(count(12, -2), preview.series, strict=False):
        values = [value if math.isfinite(value) else math.nan for _, value in series.points]
        rounds, label = [number for number, _ in series.points], "\n".join(textwrap.wrap(title(series), 100))
        axes.plot(rounds, values, marker="o", markersize=max(3, size), label=label)
    ends = [value for series in preview.series for _, value in series.points[-1:] if 0 < value < math.inf]
    # The scale starts at 0, or is logarithmic if the curves' last values differ widely.
    wide = bool(ends) and max(ends) > WIDE * min(ends)
    axes.set(xlabel="round", ylabel="ε", xlim=(0, None))
    axes.set(yscale="log") if wide else axes.set(ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="x-small")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {error.strerror}") from error
