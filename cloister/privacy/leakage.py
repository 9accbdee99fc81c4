"""What may be said about clients that noise their own models (d-privacy), and what their ledgers add up to."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cloister.core.config import PrivacyConfig

EVERYBODY = "everybody but the client itself: the server, the other clients, and whoever sees the models"
BINS = 10
"""Of the histogram of composed leakage."""
BAR = 40
"""Characters of the longest bar, where it is printed."""


def laplace_statement(privacy: PrivacyConfig, parameters: int, rounds: int) -> dict[str, Any]:
    """The claim about one client's releases, for `privacy.json`.

    What is protected is the trained model that a client sends, against other models within a distance r of it: not
    whether the client took part, and not what it holds that would move its model further. Releases add up
    (Galli et al., 2023, Theorem 4.2).

    Args:
        privacy: of the run, with `client = 'laplace'`.
        parameters: p, of one model.
        rounds: in which a client took part at most.
    """
    multiplier = privacy.client_noise_multiplier
    reasons = _reservations(privacy)
    facts: dict[str, Any] = {
        "mechanism": "laplace",
        "status": "heuristic" if reasons else "sound",
        "reasons": reasons,
        "parameters": {
            "privacy.client-noise-multiplier": multiplier,
            "privacy.radius": privacy.radius,
            "privacy.per-layer": privacy.per_layer,
            "privacy.max-leakage": privacy.max_leakage,
        },
        "unit": "neighbourhood",
        "adversary": EVERYBODY,
        "leakage-of-a-release": parameters / multiplier if multiplier else None,
        "claims": [],
        "unprotected": ["whether a client takes part, and in which rounds it abstains"],
    }
    if not reasons:
        most = rounds * parameters / multiplier
        facts["claims"] = [
            {
                "guarantee": "d-privacy, Euclidean distance of models",
                "unit": "neighbourhood",
                "adversary": EVERYBODY,
                "radius": privacy.radius,
                "scope": f"a client that took part in all {rounds} rounds",
                "leakage": min(most, privacy.max_leakage) if privacy.max_leakage else most,
            }
        ]
    return facts


def _reservations(privacy: PrivacyConfig) -> list[str]:
    reasons = []
    if not privacy.client_noise_multiplier:
        reasons.append("privacy.client-noise-multiplier is 0: there is no noise")
    if privacy.noise_seed != -1:
        reasons.append("the noise is seeded: whoever knows privacy.noise-seed can remove it")
    if not privacy.radius:
        reasons.append(
            "privacy.radius is 0: the scale of the noise follows from how far a client's own data moved its model, and "
            "tells it; what is leaked within that distance is nominal"
        )
    elif privacy.per_layer:
        reasons.append("privacy.per-layer gives every array the radius by itself: over all arrays they add up")
    return reasons


def laplace_in_words(facts: dict[str, Any]) -> list[str]:
    """The statement as lines of plain text."""
    lines = [f"clients: laplace, {facts['status']}"]
    lines += [f"  not a guarantee: {reason}" for reason in facts["reasons"]]
    if facts["leakage-of-a-release"] is not None:
        lines.append(f"  one release leaks {facts['leakage-of-a-release']:.4g} within its neighbourhood")
    for claim in facts["claims"]:
        lines.append(
            f"  leakage of at most {claim['leakage']:.4g} within distance {claim['radius']:.4g}, {claim['scope']}: "
            f"against {claim['adversary']}"
        )
    return lines + [f"  leaves without noise: {item}" for item in facts["unprotected"]]


def leakage_report(spent: Sequence[float]) -> dict[str, Any]:
    """Composed leakage over clients: median, maximum and histogram, of those that released anything with noise.

    Source: Galli et al. (2023), Table 1 and Figure 4.

    Args:
        spent: Σ ε·radius of each client; ∞ where something left without noise: of those only their number is told.
    """
    released = np.array([leakage for leakage in spent if 0 < leakage < math.inf])
    numbers = {"clients": len(spent), "that-released": len(released), "without-limit": sum(map(math.isinf, spent))}
    if not len(released):
        return numbers
    # From 0: leakages that are equal but for rounding would leave no room for bins between them.
    counts, edges = np.histogram(released, BINS, range=(0.0, released.max()))
    return {
        **numbers,
        "median": float(np.median(released)),
        "maximum": float(released.max()),
        "histogram": {"edges": [float(edge) for edge in edges], "counts": [int(count) for count in counts]},
    }


def leakage_in_words(report: dict[str, Any]) -> list[str]:
    """The report as lines of plain text, the histogram as bars."""
    lines = [f"{report['clients']} clients, of which {report['that-released']} released something with noise"]
    if report["without-limit"]:
        lines.append(f"{report['without-limit']} clients released something without noise: their leakage has no limit")
    if not report["that-released"]:
        return lines
    lines.append(f"composed leakage: median {report['median']:.4g}, maximum {report['maximum']:.4g}")
    edges, counts = report["histogram"]["edges"], report["histogram"]["counts"]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        lines.append(f"  {low:9.4g} to {high:9.4g} {count:6} {'#' * math.ceil(count / max(counts) * BAR)}".rstrip())
    return lines
