"""Curves of ε by round: the figures that a run would claim after some of its rounds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cloister.privacy.claims.claim import ClientClaim, DpSgdClaim, Figure, Statement
from cloister.privacy.claims.server import RUN
from cloister.privacy.claims.words import at_holders

POINTS = 10
"""Largest number of points of a curve."""


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        mechanism: of the figure.
        of: protected unit, in words.
        relation: which datasets are neighbours; for d-privacy, the guarantee.
        adversary: of the figure.
        delta: at which ε is stated; None for a leakage.
        points: each round with ε after it, or the leakage.
    """

    mechanism: str
    of: str
    relation: str
    adversary: str
    delta: float | None
    points: tuple[tuple[int, float], ...]


def shown_rounds(rounds: int) -> list[int]:
    """Return the rounds at which curves have points.

    These are all rounds, or `POINTS` of them with the last one.
    """
    count = min(rounds, POINTS)
    return sorted({round(1 + number * (rounds - 1) / max(1, count - 1)) for number in range(count)})


def series_of_server(statements: Mapping[int, Statement]) -> list[Series]:
    """Return the curves of the run's own figures, one for each adversary.

    Args:
        statements: by number of rounds.
    """
    found = {
        number: [(said.claim.mechanism, f"one {figure.unit}", figure) for figure in said.claim.figures]
        for number, said in statements.items()
    }
    return _joined({number: [item for item in items if item[2].scope == RUN] for number, items in found.items()})


def series_of_clients(claim: Callable[[int], ClientClaim | None], rounds: Iterable[int]) -> list[Series]:
    """Return the curves of the clients' own mechanism, one for each unit and relation.

    Args:
        claim: maps a number of rounds to the claim after them.
        rounds: at which the curves have points.
    """
    found: dict[int, list[Named]] = {}
    for number in rounds:
        made = claim(number)
        if not isinstance(made, DpSgdClaim):
            found[number] = [(made.mechanism, f"one {figure.unit}", figure) for figure in made.figures] if made else []
            continue
        found[number] = []
        for size in made.sizes:
            client = f"a client with {size.size} {made.unit}s"
            for figure in size.figures:
                protected = f"one {figure.unit} of {client}{at_holders(figure)}"
                found[number].append((made.mechanism, protected if figure.unit == made.unit else client, figure))
    return _joined(found)


Named = tuple[str, str, Figure]
"""Figure with its mechanism and its protected unit."""


def _joined(found: Mapping[int, list[Named]]) -> list[Series]:
    """Return one curve for each figure, over the rounds."""
    curves: dict[tuple[str, str, str, str, float | None], list[tuple[int, float]]] = {}
    for number, items in found.items():
        for mechanism, whom, figure in items:
            value = figure.epsilon if figure.leakage is None else figure.leakage
            key = (mechanism, whom, figure.relation or figure.guarantee or "", figure.adversary or "", figure.delta)
            curves.setdefault(key, []).append((number, value or 0.0))
    return [Series(*key, tuple(points)) for key, points in curves.items()]
