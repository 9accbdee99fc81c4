"""The page about a run, made from its directory alone: the same files give the same bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloister.config.run import RunConfig
from cloister.config.section import Scalar
from cloister.core.files import atomic_path
from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LocalClaim
from cloister.privacy.claims.meaning import best_guess, meanings, percent
from cloister.server.reports.html.facts import Facts, RoundFacts
from cloister.server.reports.html.figures import confusion, curves, taken_for, thinned
from cloister.server.reports.html.officer import claims_of, figures_of, questions
from cloister.server.reports.html.statements import Statements
from cloister.server.reports.html.template import MACROS, PAGE, STYLE
from cloister.server.reports.html.text import clean
from cloister.server.reports.rundir import REPORT
from cloister.tasks.scores import Classification, ClassScores

REASONS = 6
"""Rows of the table of replies that did not count: the most frequent reasons."""
CLASSES = 12
"""Rows of the table by class; of more classes, those with the lowest recall."""
ROUNDS = 200
"""Rows of the table by round."""
SETTINGS = 24
"""Settings that have room in print; the whole configuration stands below, on a screen."""
HASHES = 8
WORDS = 140
"""Characters of a reason or a value, in a table."""
HOW = {
    "budget": "a budget ended it",
    "operator": "the operator ended it",
    "too-few-nodes": "too few nodes stayed connected",
    "disk": "the disk was full",
    "no-replies": "nobody's reply counted",
    "error": "it did not end in order",
}
NO_EPSILON = (
    "There is no curve of ε: the server's mechanism claims none. What clients with a mechanism of their own have spent "
    "stands in their own ledgers."
)
EPSILON = (
    "ε by round is that of everything in the ledger, earlier runs on the same data included, as it was counted while "
    "the run went on; the claim counts the whole run by the tightest accountant."
)


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
    nodes: int
    rounds: str


def write_report(directory: Path, statements: Statements | None = None) -> Path:
    """Write `report.html` into a run directory.

    Args:
        directory: of a run that has ended.
        statements: of the operator, for the officer's page; without them all are marked as still to be stated.

    Returns:
        Its path.

    Raises:
        ConfigError: the directory cannot be read as that of a run.
    """
    page = rendered(Facts.read(directory), statements or Statements())
    path = directory / REPORT
    with atomic_path(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return path


def rendered(facts: Facts, statements: Statements) -> str:
    """The page.

    Args:
        facts: of the run.
        statements: of the operator.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_finalized
    )
    context = {
        "style": STYLE,
        "name": facts.name,
        "about": _about(facts),
        "questions": questions(facts, statements),
        **_claim(facts),
        **_course(facts),
        **_results(facts),
    }
    return environment.from_string(MACROS + PAGE).render(context)


def _finalized(value: Any) -> Any:
    """Text of a run as it may stand on a page; markup of ours as it is."""
    return clean(value) if type(value) is str else value


def _about(facts: Facts) -> str:
    config = facts.config
    client = config.get("privacy.client", "none")
    beside = "" if client == "none" else f", {client} on the clients"
    several = sum(name.startswith("hypothesis-") for name in facts.models)
    models = f" {several} models side by side, of which each client takes the one that suits it." if several else ""
    return (
        f"Task {config.get('task.name')}, strategy {config.get('strategy.name')}, privacy: "
        f"{config.get('privacy.server')} on the server{beside}.{models}"
    )


def _claim(facts: Facts) -> dict[str, object]:
    statement = facts.statement
    claims = claims_of(facts)
    rows = [_figure_row(claim, about, figure) for claim in claims for about, figure in figures_of(claim)]
    clients = statement.clients if statement is not None else None
    left = (*(statement.claim.unprotected if statement else ()), *(clients.unprotected if clients else ()))
    return {
        "meanings": meanings(statement) if statement is not None else (),
        "figures": rows,
        "unprotected": tuple(dict.fromkeys(left)),
        "more": _hidden(facts),
    }


def _figure_row(claim: Claim, about: str, figure: Figure) -> FigureRow:
    epsilon, delta = figure.epsilon or 0.0, figure.delta or 0.0
    against = figure.adversary or ""
    scope = [part for part in (about or figure.scope, figure.relation, figure.condition, figure.counts) if part]
    kept = f"a budget, kept by {figure.filter}" if figure.budget else ""
    by = f"by {figure.accountant}" if figure.accountant else kept
    return FigureRow(
        claim.mechanism,
        figure.unit,
        f"{'≤ ' if figure.budget else ''}{epsilon:.4g}",
        f"{delta:g}",
        percent(best_guess(epsilon, delta)),
        against.partition(":")[0] if isinstance(claim, DpSgdClaim | LocalClaim) else against,
        "; ".join([*scope, by] if by else scope),
    )


def _hidden(facts: Facts) -> str:
    if facts.secret_cohorts:
        return "Who was drawn, and how many, is secret: this page has no numbers of replies and no times."
    return ""


def _course(facts: Facts) -> dict[str, object]:
    rows = _rejected(facts.rounds)
    changed = _changed(facts.config)
    return {
        "ending": _ending(facts),
        "curves": curves(facts.rounds),
        "notes": [EPSILON if any("epsilon" in done.measured for done in facts.rounds) else NO_EPSILON],
        "secret": facts.secret_cohorts,
        "rejected": rows[:REASONS],
        "left_out": f", the {REASONS} most frequent of {len(rows)} reasons" if len(rows) > REASONS else "",
        "columns": (columns := _columns(facts.rounds)),
        "by_round": _by_round(facts.rounds, columns),
        "hashes": _first(_hashes(facts), HASHES),
        "changed": _first(changed, SETTINGS),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "settings": sorted((key, str(value)) for key, value in facts.config.items()),
    }


def _ending(facts: Facts) -> str:
    rounds = facts.rounds[-1].number if facts.rounds else 0
    done = f"{rounds} of {facts.config.get('num-rounds')} rounds were run"
    how = HOW.get(facts.ending.how, "the run ended as asked")
    return f"{done}; {how}: {_short(facts.ending.why, 300)}." if facts.ending.why else f"{done}; {how}."


def _first(pairs: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """So many of the pairs, each short enough for one line or two, and how many more there are."""
    more = [("…", f"{len(pairs) - most} more")] if pairs[most:] else []
    return [(name, _short(value)) for name, value in pairs[:most]] + more


def _short(text: str, most: int = WORDS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _rejected(rounds: Iterable[RoundFacts]) -> list[RejectedRow]:
    """By code and reason, the most frequent first."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for done in rounds:
        for item in (*done.rejected, *done.unscored):
            found.setdefault((item.code, item.detail), []).append((done.number, item.node_id))
    rows = [
        RejectedRow(
            code, _short(detail), len(seen), len({node for _, node in seen}), _spans([number for number, _ in seen])
        )
        for (code, detail), seen in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.replies, row.code, row.detail))


def _spans(numbers: Sequence[int]) -> str:
    """Rounds in words: from the first to the last of them."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _columns(rounds: Iterable[RoundFacts]) -> list[str]:
    return list(dict.fromkeys(name for done in rounds for name in _cells(done)))


def _cells(done: RoundFacts) -> dict[str, float | str]:
    cells: dict[str, float | str] = {**done.central}
    cells |= {f"{name} (clients)": value for name, value in done.federated.items()}
    cells |= {name.replace("_", " "): value for name, value in done.measured.items()}
    return cells | ({"replies": f"{done.replies[0]}/{done.replies[1]}"} if done.replies else {})


def _by_round(rounds: Sequence[RoundFacts], columns: Sequence[str]) -> list[tuple[int, list[str]]]:
    return [
        (rounds[place].number, [_number(_cells(rounds[place]).get(name, "")) for name in columns])
        for place in thinned(range(len(rounds)), ROUNDS)
    ]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _hashes(facts: Facts) -> list[tuple[str, str]]:
    found = [("configuration", facts.digest)]
    found.append(("app bundle", facts.bundle or "none: the run was not started by Flower"))
    if facts.statement is not None:
        found.append(("last line of the ledger", facts.statement.ledger.head))
    return [*found, *facts.models.items()]


def _changed(config: Mapping[str, Scalar]) -> list[tuple[str, str]]:
    defaults = RunConfig().flat()
    return [(key, str(value)) for key, value in config.items() if key not in defaults or value != defaults[key]]


def _results(facts: Facts) -> dict[str, object]:
    found = facts.evaluation.classification if facts.evaluation is not None else None
    shown = _classes(found) if found is not None else []
    more = found is not None and len(found.classes) > len(shown)
    return {
        "evaluation": facts.evaluation,
        "classification": found,
        "classes": shown,
        "classes_left_out": f": the {len(shown)} of lowest recall of {len(found.classes)}" if found and more else "",
        "confusion": confusion(found) if found is not None else None,
        "audit": facts.audit,
    }


def _classes(found: Classification) -> list[tuple[ClassScores, str]]:
    rows = [(scored, taken_for(found, number)) for number, scored in enumerate(found.classes)]
    if len(rows) <= CLASSES:
        return rows
    return sorted((row for row in rows if row[0].support), key=lambda row: row[0].recall)[:CLASSES]
