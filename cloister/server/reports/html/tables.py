"""Tables of a report, truncated to the report's maximum length."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cloister.aggregation.screening import Rejection
from cloister.core.digits import at_least, at_most
from cloister.privacy.claims.claim import Claim, DpSgdClaim, LocalClaim
from cloister.privacy.claims.meaning import percent
from cloister.privacy.claims.premises import condition
from cloister.privacy.claims.words import at_holders, limits_of
from cloister.privacy.claims.worth import best_guess
from cloister.server.reports.html.facts import Facts, RoundFacts
from cloister.server.reports.html.figures import taken_for, thinned
from cloister.server.reports.html.officer import figures_of
from cloister.tasks.scores import Classification, ClassScores

CLASSES = 12
"""Maximum rows of the table by class; of more classes, those with the lowest recall."""
ROUNDS = 200
"""Maximum rows of the table by round."""
CLASS_NAME = 48
"""Maximum characters of a class's name, which is wrapped."""
NAMES = 5
"""Maximum number of sites that one row names."""
WORDS = 140
"""Maximum characters of a reason or a value, in a table."""
BOUNDS = {"epsilon": at_most, "noise multiplier": at_least}
"""Rounding of bounds in the table by round."""


@dataclass(frozen=True)
class FigureRow:
    """One row of the table of figures, in words."""

    mechanism: str
    unit: str
    epsilon: str
    delta: str
    guess: str
    adversary: str
    scope: str


@dataclass(frozen=True)
class RejectedRow:
    """Replies that did not count, for one reason."""

    code: str
    detail: str
    replies: int
    nodes: str
    rounds: str


def figure_rows(claims: Iterable[Claim]) -> list[FigureRow]:
    """Return one row for every figure with an ε.

    For DP-SGD, only figures about its own unit have one.
    """
    rows = []
    for claim, about, figure in ((each, *found) for each in claims for found in figures_of(each)):
        if isinstance(claim, DpSgdClaim) and figure.unit != claim.unit:
            continue
        epsilon, delta, against = figure.bound, figure.delta or 0.0, figure.adversary or ""
        counted_over = f"{about or figure.scope or ''}{at_holders(figure)}"
        kept = f"a budget, kept by {figure.filter}" if figure.budget else ""
        by = f"by {figure.accountant}" if figure.accountant else kept
        told = (counted_over, figure.relation, condition(figure.premises), figure.counts, *limits_of(claim), by)
        rows.append(
            FigureRow(
                claim.mechanism,
                figure.unit,
                f"{'≤ ' if figure.budget else ''}{at_most(epsilon)}",
                at_most(delta),
                percent(best_guess(epsilon, delta)),
                against.partition(":")[0] if isinstance(claim, DpSgdClaim | LocalClaim) else against,
                "; ".join(part for part in told if part),
            )
        )
    return rows


def rejected_rows(rounds: Iterable[RoundFacts]) -> list[RejectedRow]:
    """Return the replies that did not count, the most frequent reason first."""
    found: dict[tuple[str, str], list[tuple[int, Rejection]]] = {}
    for done in rounds:
        for item in (*done.rejected, *done.unscored):
            found.setdefault((item.code, item.detail), []).append((done.number, item))
    rows = []
    for (code, detail), seen in found.items():
        numbers, items = zip(*seen, strict=True)
        low, high = min(numbers), max(numbers)
        # The names of few named sites; otherwise the number of nodes.
        names = sorted({item.site for item in items})
        named = all(names) and len(names) <= NAMES
        whose = ", ".join(names) if named else str(len({item.node_id for item in items}))
        rows.append(RejectedRow(code, short(detail), len(seen), whose, str(low) if low == high else f"{low} to {high}"))
    return sorted(rows, key=lambda row: (-row.replies, row.code, row.detail))


def columns_of(rounds: Iterable[RoundFacts]) -> list[str]:
    """Return the names of the values that any round has."""
    return list(dict.fromkeys(name for done in rounds for name in _cells(done)))


def _cells(done: RoundFacts) -> dict[str, float | str]:
    cells: dict[str, float | str] = {**done.central}
    cells |= {f"{name} (clients)": value for name, value in done.federated.items()}
    cells |= {name.replace("_", " "): value for name, value in done.measured.items()}
    return cells | ({"replies": f"{done.replies[0]}/{done.replies[1]}"} if done.replies else {})


def by_round(rounds: Sequence[RoundFacts], columns: Sequence[str]) -> list[tuple[int, list[str]]]:
    """Return rounds with their values, evenly thinned to `ROUNDS`.

    Args:
        rounds: in their order.
        columns: names, from `columns_of`.
    """
    return [
        (rounds[place].number, [_number(name, _cells(rounds[place]).get(name, "")) for name in columns])
        for place in thinned(range(len(rounds)), ROUNDS)
    ]


def _number(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return BOUNDS[name](value) if name in BOUNDS else f"{value:.4g}"


def hashes_of(facts: Facts) -> list[tuple[str, str]]:
    """Return the SHA-256 of configuration, app bundle, ledger and models."""
    found = [("configuration", facts.digest)]
    found.append(("app bundle", facts.bundle or "none: the run was not started by Flower"))
    if facts.statement is not None:
        found.append(("last line of the ledger", facts.statement.ledger.head))
    return [*found, *facts.models.items()]


def readable(found: Classification) -> Classification:
    """Return the classification with names of at most `CLASS_NAME` characters."""
    return replace(found, classes=tuple(replace(each, name=short(each.name, CLASS_NAME)) for each in found.classes))


def class_rows(found: Classification) -> list[tuple[ClassScores, str]]:
    """Return classes, each with the class it is most often mistaken for.

    Of many classes, it returns those of lowest recall.
    """
    rows = [(scored, taken_for(found, number)) for number, scored in enumerate(found.classes)]
    if len(rows) <= CLASSES:
        return rows
    return sorted((row for row in rows if row[0].support), key=lambda row: row[0].recall)[:CLASSES]


def first(pairs: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """Return the first pairs, shortened, and the number of further ones.

    Args:
        pairs: of names and values.
        most: maximum number of pairs.
    """
    more = [("…", f"{len(pairs) - most} more")] if pairs[most:] else []
    return [(name, short(value)) for name, value in pairs[:most]] + more


def short(text: str, most: int = WORDS) -> str:
    """Return a text, truncated to a maximum length.

    Args:
        text: of any length.
        most: maximum characters.
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"
