"""Report of a run as one HTML page. The same run directory gives the same bytes."""

from collections.abc import Iterator
from pathlib import Path

from cloister.config.run import changed
from cloister.core.files import atomic_path
from cloister.privacy.claims.claim import DpSgdClaim
from cloister.privacy.claims.meaning import meanings
from cloister.privacy.claims.words import SIMULATED
from cloister.server.reports.html.facts import Facts
from cloister.server.reports.html.figures import confusion, curves
from cloister.server.reports.html.filling import filled
from cloister.server.reports.html.officer import claims_of, questions, unprotected
from cloister.server.reports.html.statements import Statements, keep, kept
from cloister.server.reports.html.tables import (
    by_round,
    class_rows,
    columns_of,
    figure_rows,
    first,
    hashes_of,
    readable,
    rejected_rows,
    short,
)
from cloister.server.reports.html.template import PAGE
from cloister.server.reports.rundir import REPORT

REASONS = 6
"""Maximum rows of the table of replies that did not count, for the most frequent reasons."""
SETTINGS, HASHES = 24, 8
"""Maximum rows in print; the page on a screen shows all of them below."""
HOW = {
    "budget": "a budget ended it",
    "operator": "the operator ended it",
    "too-few-nodes": "too few nodes stayed connected",
    "disk": "the disk was full",
    "no-replies": "nobody's reply counted",
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
        **_results(facts),
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
    return {
        "ending": f"{last} of {facts.config.get('num-rounds')} rounds were run; {how}{why}.",
        "curves": curves(facts.rounds),
        "notes": list(_about_epsilon(facts)),
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


def _about_epsilon(facts: Facts) -> Iterator[str]:
    """Yield the explanation of ε by round, or the reason for its absence."""
    statement = facts.statement
    if any("epsilon" in done.measured for done in facts.rounds):
        yield EPSILON
    elif statement is None:
        yield NONE_WRITTEN
    elif not statement.claim.is_guaranteed:
        yield NONE_CLAIMED
        yield from () if statement.clients is None else (OF_CLIENTS,)
    else:
        yield UNKNOWN_OVER_ALL if statement.ledger.holds_releases_without_a_guarantee else NONE_WRITTEN


def _results(facts: Facts) -> dict[str, object]:
    whole = facts.evaluation.classification if facts.evaluation is not None else None
    found = readable(whole) if whole is not None else None
    shown = class_rows(found) if found is not None else []
    more = found is not None and len(found.classes) > len(shown)
    sizes = [sum(row) for row in found.confusion] if found is not None else []  # the accuracy of a constant guess
    return {
        "evaluation": facts.evaluation,
        "classification": found,
        "largest": f"{100 * max(sizes) / max(1, sum(sizes)):.4g} %" if sizes else "",
        "classes": shown,
        "classes_left_out": f": the {len(shown)} of lowest recall of {len(found.classes)}" if found and more else "",
        "confusion": confusion(found) if found is not None else None,
        "audit": facts.audit,
    }
