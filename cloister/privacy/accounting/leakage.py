"""Report on the composed leakage of clients that noise their own models (d-privacy)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cloister.core.digits import at_most

BINS = 10
"""Bins of the histogram of composed leakage."""
BAR = 40
"""Characters of the longest printed bar."""


def leakage_report(spent: Sequence[float]) -> dict[str, Any]:
    """Return median, maximum and histogram of the clients' composed leakage.

    Source: Galli et al. (2023), Table 1 and Figure 4.

    Args:
        spent: Σ ε·radius of each client; ∞ after a release without noise: such clients are only counted.
    """
    released = np.array([leakage for leakage in spent if 0 < leakage < math.inf])
    numbers = {"clients": len(spent), "that-released": len(released), "without-limit": sum(map(math.isinf, spent))}
    if not len(released):
        return numbers
    # From 0: between leakages that are equal up to rounding, bins would have no width.
    counts, edges = np.histogram(released, BINS, range=(0.0, released.max()))
    return {
        **numbers,
        "median": float(np.median(released)),
        "maximum": float(released.max()),
        "histogram": {"edges": [float(edge) for edge in edges], "counts": [int(count) for count in counts]},
    }


def render_leakage(report: dict[str, Any]) -> list[str]:
    """Return the report as lines of plain text, the histogram as bars."""
    lines = [f"{report['clients']} clients, of which {report['that-released']} released something with noise"]
    if report["without-limit"]:
        lines.append(f"{report['without-limit']} clients released something without noise: their leakage has no limit")
    if not report["that-released"]:
        return lines
    lines.append(f"composed leakage: median {at_most(report['median'])}, maximum {at_most(report['maximum'])}")
    edges, counts = report["histogram"]["edges"], report["histogram"]["counts"]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        lines.append(f"  {low:9.4g} to {high:9.4g} {count:6} {'#' * math.ceil(count / max(counts) * BAR)}".rstrip())
    return lines
