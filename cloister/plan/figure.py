"""ε by round as a picture."""

import math
import textwrap
from pathlib import Path

from cloister.core.errors import ConfigError
from cloister.plan.preview import Preview
from cloister.plan.words import title


def draw(preview: Preview, path: Path) -> None:
    """Write the curves of a preview as a PNG file.

    Args:
        preview: of a run.
        path: of the file; its folder must be there.

    Raises:
        ConfigError: there is no curve, or the file cannot be written.
    """
    if not preview.series:
        raise ConfigError(f"--png {path}: no ε is claimed for this run, so that there is no curve to draw")
    # The canvas of its own keeps pyplot, and with it every kind of window, out of the process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for series in preview.series:
        values = [value if math.isfinite(value) else math.nan for _, value in series.points]
        axes.plot([number for number, _ in series.points], values, marker="o", label=_wrapped(title(series)))
    axes.set(xlabel="round", ylabel="ε", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="x-small")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {error.strerror}") from error


def _wrapped(text: str, width: int = 100) -> str:
    return "\n".join(textwrap.wrap(text, width))
