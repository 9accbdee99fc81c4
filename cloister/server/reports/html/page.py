"""Report of a run as one HTML page. The same run directory gives the same bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloister.config.run import changed
from cloister.privacy.claims.claim import Claim, DpSgdClaim, LocalClaim
from cloister.privacy.claims.premises import condition
from cloister.privacy.claims.render import SIMULATED, at_holders, best_guess, limits_of, meanings, percent
from cloister.server.reports.html.compliance import claims_of, figures_of, questions, unprotected
from cloister.server.reports.html.data import Facts, RoundFacts, Statements, keep, kept
from cloister.server.reports.html.figures import confusion, curves, most_confused_with, roc, thinned
from cloister.server.reports.html.templates import PAGE, filled
from cloister.server.reports.rundir import REPORT
from cloister.server.screening import Rejection
from cloister.tasks.scores import Classification, ClassScores
from cloister.utils.files import atomic_path
from cloister.utils.text import at_least, at_most

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
REASONS = 6
"""Maximum rows of the table of replies that did not count, for the most frequent reasons."""
SETTINGS, HASHES = 24, 8
"""Maximum rows in print; the page on a screen shows all of them below."""
HOW = {
    "budget": "a budget ended it",
    "site-budgets": "the budgets of the sites were spent",
    "operator": "the operator ended it",
    "too-few-nodes": "too few nodes stayed connected",
    "disk": "the disk was full",
    "no-replies": "no reply counted",
    "error": "it has not ended in order",
}
UNKNOWN_OVER_ALL = (
    "There is no curve of ε: the ledger holds releases without a guarantee, so that ε over everything in it is "
    "unknown. What is claimed is about this run alone."
)
NONE_CLAIMED = "There is no curve of ε: nothing on the server claims one."
OF_CLIENTS = "Sites with data of their own keep ledgers of what they have spent; simulated clients keep none."
NONE_WRITTEN = "There is no curve of ε: no round has written one down."
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
                claim.word_for(figure.unit),
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
    found = []
    for place in thinned(range(len(rounds)), ROUNDS):
        texts = []
        for name in columns:
            value = _cells(rounds[place]).get(name, "")
            if isinstance(value, str):
                texts.append(value)
            else:
                texts.append(BOUNDS[name](value) if name in BOUNDS else f"{value:.4g}")
        found.append((rounds[place].number, texts))
    return found


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
    rows = [(scored, most_confused_with(found, number)) for number, scored in enumerate(found.classes)]
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


def write_report(directory: Path, statements: Statements | None = None) -> Path:
    """Write `report.html` into a run directory.

    Args:
        directory: of a run that has ended.
        statements: of the operator, for the officer's page; stored for later reports. None: the stored ones. Missing
            statements are marked as open.

    Returns:
        The path of the report.

    Raises:
        ConfigError: the directory contains no readable run.
    """
    facts = Facts.read(directory)
    page = rendered(facts, kept(directory) if statements is None else statements)
    path = directory / REPORT
    with atomic_path(path) as partial:
        partial.write_text(page, encoding="utf-8")
    if statements is not None:
        keep(directory, statements)
    return path


def rendered(facts: Facts, statements: Statements) -> str:
    """Return the report as HTML.

    Args:
        facts: of the run.
        statements: of the operator.
    """
    config, statement, claims = facts.config, facts.statement, claims_of(facts)
    client = config.get("privacy.client", "none")
    beside = "" if client == "none" else f", {client} on the clients"
    several = sum(name.startswith("hypothesis-") for name in facts.models)
    models = f" {several} models side by side, of which each client takes the one that suits it." if several else ""
    secret = "Who was drawn, and how many, is secret: this page has no numbers of replies and no times."
    whole = facts.evaluation.classification if facts.evaluation is not None else None
    found = readable(whole) if whole is not None else None
    named = (
        [replace(each, name=short(each.name, CLASS_NAME)) for each in facts.evaluation.roc] if facts.evaluation else []
    )
    shown = class_rows(found) if found is not None else []
    is_cut = found is not None and len(found.classes) > len(shown)
    sizes = [sum(row) for row in found.confusion] if found is not None else []  # the accuracy of a constant guess
    context = {
        "name": facts.name,
        "about": (
            f"Task {config.get('task.name')}, strategy {config.get('strategy.name')}, privacy: "
            f"{config.get('privacy.server')} on the server{beside}.{models}"
        ),
        "questions": questions(facts, statements),
        "simulated": SIMULATED if statement is not None and statement.simulated else "",
        "meanings": meanings(statement) if statement is not None else (),
        "figures": figure_rows(claims),
        "of_whole_clients": any(isinstance(claim, DpSgdClaim) for claim in claims),
        "unprotected": unprotected(facts),
        "more": secret if facts.secret_cohorts else "",
        **_course(facts),
        "evaluation": facts.evaluation,
        "classification": found,
        "largest": f"{100 * max(sizes) / max(1, sum(sizes)):.4g} %" if sizes else "",
        "classes": shown,
        "classes_left_out": f": the {len(shown)} of lowest recall of {len(found.classes)}" if found and is_cut else "",
        "confusion": confusion(found) if found is not None else None,
        "roc": roc(named) if named else None,
        "audit": facts.audit,
    }
    return filled(PAGE, context)


def _course(facts: Facts) -> dict[str, object]:
    rows, hashes = rejected_rows(facts.rounds), hashes_of(facts)
    columns = columns_of(facts.rounds)
    last = facts.rounds[-1].number if facts.rounds else 0
    how = HOW.get(facts.ending.how, "the run ended as asked")
    if facts.statement is not None and facts.statement.released_nothing:
        how = f"nothing was released; {how}"
    why = f": {short(facts.ending.why, 300)}" if facts.ending.why else ""
    statement = facts.statement
    if any("epsilon" in done.measured for done in facts.rounds):
        notes = [EPSILON]
    elif statement is None:
        notes = [NONE_WRITTEN]
    elif not statement.claim.is_guaranteed:
        notes = [NONE_CLAIMED, *([] if statement.clients is None else [OF_CLIENTS])]
    else:
        notes = [UNKNOWN_OVER_ALL if statement.ledger.holds_releases_without_a_guarantee else NONE_WRITTEN]
    return {
        "ending": f"{last} of {facts.config.get('num-rounds')} rounds were run; {how}{why}.",
        "curves": curves(facts.rounds),
        "notes": notes,
        "secret": facts.secret_cohorts,
        "rejected": rows[:REASONS],
        "left_out": f", the {REASONS} most frequent of {len(rows)} reasons" if len(rows) > REASONS else "",
        "columns": columns,
        "by_round": by_round(facts.rounds, columns),
        "hashes": first(hashes, HASHES),
        "changed": first([(key, str(value)) for key, value in changed(facts.config).items()], SETTINGS),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "parameters": str(facts.parameters or ""),
        "settings": [*sorted((key, str(value)) for key, value in facts.config.items()), *hashes],
    }
