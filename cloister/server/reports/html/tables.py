"""What of a run stands in tables: rows in words, and no more of them than a page has room for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cloister.aggregation.screening import Rejection
from cloister.core.digits import at_least, at_most
from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LocalClaim
from cloister.privacy.claims.meaning import percent
from cloister.privacy.claims.premises import condition
from cloister.privacy.claims.words import at_holders, limits_of
from cloister.privacy.claims.worth import best_guess
from cloister.server.reports.html.facts import Facts, RoundFacts
from cloister.server.reports.html.figures import taken_for, thinned
from cloister.server.reports.html.officer import figures_of
from cloister.tasks.scores import Classification, ClassScores

CLASSES = 12
"""Rows of the table by class; of more classes, those with the lowest recall."""
ROUNDS = 200
"""Rows of the table by round."""
CLASS_NAME = 48
"""Characters of a class's name, which is wrapped."""
NAMES = 5
"""Sites that are named in one row."""
WORDS = 140
"""Characters of a reason or a value, in a table."""
BOUNDS = {"epsilon": at_most, "noise multiplier": at_least}
"""How what bounds something is rounded in the table by round."""


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
    """Replies that did not count for one reason."""

    code: str
    detail: str
    replies: int
    nodes: str
    rounds: str


def figure_rows(claims: Iterable[Claim]) -> list[FigureRow]:
    """A row for every figure with an ε; of DP-SGD those about its own unit, as a whole client is hardly protected."""
    return [
        _figure_row(claim, about, figure)
        for claim in claims
        for about, figure in figures_of(claim)
        if not isinstance(claim, DpSgdClaim) or figure.unit == claim.unit
    ]


def _figure_row(claim: Claim, about: str, figure: Figure) -> FigureRow:
    epsilon, delta = figure.bound, figure.delta or 0.0
    against = figure.adversary or ""
    counted_over = f"{about or figure.scope or ''}{at_holders(figure)}"
    told = (counted_over, figure.relation, condition(figure.premises), figure.counts, *limits_of(claim))
    scope = [part for part in told if part]
    kept = f"a budget, kept by {figure.filter}" if figure.budget else ""
    by = f"by {figure.accountant}" if figure.accountant else kept
    return FigureRow(
        claim.mechanism,
        figure.unit,
        f"{'≤ ' if figure.budget else ''}{at_most(epsilon)}",
        at_most(delta),
        percent(best_guess(epsilon, delta)),
        against.partition(":")[0] if isinstance(claim, DpSgdClaim | LocalClaim) else against,
        "; ".join([*scope, by] if by else scope),
    )


def rejected_rows(rounds: Iterable[RoundFacts]) -> list[RejectedRow]:
    """Replies that did not count, by code and reason, the most frequent first."""
    found: dict[tuple[str, str], list[tuple[int, Rejection]]] = {}
    for done in rounds:
        for item in (*done.rejected, *done.unscored):
            found.setdefault((item.code, item.detail), []).append((done.number, item))
    rows = [
        RejectedRow(
            code, short(detail), len(seen), _whose([item for _, item in seen]), _spans([number for number, _ in seen])
        )
        for (code, detail), seen in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.replies, row.code, row.detail))


def _whose(rejected: Sequence[Rejection]) -> str:
    """The names of the sites, if there are few and all have one; else how many nodes they are."""
    names = sorted({item.site for item in rejected})
    return ", ".join(names) if all(names) and len(names) <= NAMES else str(len({item.node_id for item in rejected}))


def _spans(numbers: Sequence[int]) -> str:
    """Rounds in words: from the first to the last of them."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def columns_of(rounds: Iterable[RoundFacts]) -> list[str]:
    """What is known of any of the rounds, by name."""
    return list(dict.fromkeys(name for done in rounds for name in _cells(done)))


def _cells(done: RoundFacts) -> dict[str, float | str]:
    cells: dict[str, float | str] = {**done.central}
    cells |= {f"{name} (clients)": value for name, value in done.federated.items()}
    cells |= {name.replace("_", " "): value for name, value in done.measured.items()}
    return cells | ({"replies": f"{done.replies[0]}/{done.replies[1]}"} if done.replies else {})


def by_round(rounds: Sequence[RoundFacts], columns: Sequence[str]) -> list[tuple[int, list[str]]]:
    """Rounds with what is known of them; of very many, evenly spaced ones.

    Args:
        rounds: in their order.
        columns: names, as `columns_of` gives them.
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
    """SHA-256 of whatever belongs to a run."""
    found = [("configuration", facts.digest)]
    found.append(("app bundle", facts.bundle or "none: the run was not started by Flower"))
    if facts.statement is not None:
        found.append(("last line of the ledger", facts.statement.ledger.head))
    return [*found, *facts.models.items()]


def readable(found: Classification) -> Classification:
    """The same with names that have room on a page: a name may be of any length."""
    return replace(found, classes=tuple(replace(each, name=short(each.name, CLASS_NAME)) for each in found.classes))


def class_rows(found: Classification) -> list[tuple[ClassScores, str]]:
    """Classes, each with what it is most often taken for; of many, those of lowest recall."""
    rows = [(scored, taken_for(found, number)) for number, scored in enumerate(found.classes)]
    if len(rows) <= CLASSES:
        return rows
    return sorted((row for row in rows if row[0].support), key=lambda row: row[0].recall)[:CLASSES]


def first(pairs: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """So many of the pairs, each short enough for one line or two, and how many more there are.

    Args:
        pairs: of names and values.
        most: how many.
    """
    more = [("…", f"{len(pairs) - most} more")] if pairs[most:] else []
    return [(name, short(value)) for name, value in pairs[:most]] + more


def short(text: str, most: int = WORDS) -> str:
    """The beginning of a text.

    Args:
        text: of any length.
        most: characters.
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"
