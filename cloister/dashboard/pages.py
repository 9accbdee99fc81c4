"""The pages of the dashboard as HTML, made from a view."""

import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock

from cloister.core.digits import at_least, at_most
from cloister.core.files import read_text
from cloister.dashboard.template import FRAME, OVERVIEW, RUN, STYLE
from cloister.dashboard.views import Run, View
from cloister.server.reports.html.facts import RoundFacts, cohorts_are_secret, rounds_in
from cloister.server.reports.html.figures import Picture, curves
from cloister.server.reports.html.filling import filled
from cloister.server.reports.html.tables import rejected_rows
from cloister.server.reports.rundir import REPORT, ROUNDS
from cloister.server.reports.status import RunState, state_told

DRAWN = 16
"""Runs whose figures are kept, because drawing them takes longest."""
_drawing = Lock()
"""The settings of matplotlib belong to the process, and pages are made in threads."""


def overview(view: View, connection: str, live: bool) -> str:
    """The first page: events, nodes, runs, budgets.

    Args:
        view: to be shown.
        connection: name of the SuperLink; empty: none is asked.
        live: whether the page is asked to renew itself.
    """
    snapshot = view.snapshot
    nodes = snapshot.nodes
    context = {
        "connection": connection,
        "found": view.found,
        "rejected": snapshot.run.rejected if snapshot.run else (),
        "nodes": nodes,
        "online": sum(node["status"] == "online" for node in nodes or ()),
        "runs": [{"name": run.name, "facts": _facts(run.state)} for run in view.runs],
        "older": view.older,
        "spent": [
            {"ledger": ledger, "unit": unit, "share": f"{at_most(100 * share, 3)} %"}
            for (ledger, unit), share in snapshot.spent.items()
        ],
        "closed": [{"ledger": ledger, "unit": unit} for ledger, unit in snapshot.closed],
    }
    return _page(OVERVIEW, view, live, context)


def run_page(view: View, run: Run, live: bool) -> str:
    """The page of one run: its state, curves, and the replies that did not count.

    Args:
        view: to be shown.
        run: of the view.
        live: whether the page is asked to renew itself.
    """
    rounds, drawn = _rounds(_text(run.path / ROUNDS))
    context = {
        "name": run.name,
        "report": (run.path / REPORT).is_file(),
        "facts": run.state,
        "told": _told(run.state) if run.state else [],
        "found": [item for item in view.found if run.state and item.about == run.state.path],
        "curves": () if run.hides_ledger else drawn,
        "curves_hidden": run.hides_ledger,
        "secret_cohorts": cohorts_are_secret(rounds),
        "rejected": rejected_rows(rounds),
    }
    return _page(RUN, view, live, context)


def _page(page: str, view: View, live: bool, context: Mapping[str, object]) -> str:
    secret = view.hides_progress
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.when))
    frame = {"own_style": STYLE, "when": when, "live": live and not secret, "secret": secret}
    return filled(page, {**frame, **context}, FRAME)


def _facts(run: RunState | None) -> dict[str, str] | None:
    if run is None:
        return None
    return {
        "task": run.task,
        "privacy": run.privacy,
        "round": f"{run.round}/{run.rounds}",
        "state": _state(run),
        "left": _left(run.seconds_left),
        "epsilon": _epsilon(run),
        "little": run.worth,
    }


def _told(run: RunState) -> list[tuple[str, str]]:
    """What `cloister status` says about a run; what it does not know has no line."""
    little = f"; it is {run.worth}" if run.worth else ""
    claimed = "" if run.claimed is None else f"{at_most(run.claimed, 3)}, for one {run.claimed_for}{little}"
    facts = [
        ("Directory", run.path),
        ("Task", run.task),
        ("Strategy", run.strategy),
        ("Privacy", run.privacy),
        ("Round", f"{run.round} of {run.rounds}"),
        ("State", _state(run)),
        ("Why it ended", run.why),
        ("Time left", _left(run.seconds_left)),
        ("Replies that counted", f"{run.replies[0]} of {run.replies[1]}" if run.replies else ""),
        ("ε that is claimed", claimed),
        ("Premises of the claim", run.premises),
        (
            "ε of the ledger",
            "" if run.epsilon is None else f"{at_most(run.epsilon, 3)}{little if run.claimed is None else ''}",
        ),
        ("Left of the budget", "" if run.budget_left is None else at_least(run.budget_left, 3)),
    ]
    return [(title, value) for title, value in facts if value]


def _epsilon(run: RunState) -> str:
    """What an ended run claims; what is in the ledger so far of one that goes on."""
    if run.claimed is not None:
        return at_most(run.claimed, 3) + (f" ({run.claimed_for})" if run.claimed_for != "client" else "")
    if run.state != "running" or run.privacy == "none":
        return "none claimed"
    return "not told yet" if run.epsilon is None else f"{at_most(run.epsilon, 3)} so far"


def _state(run: RunState) -> str:
    return f"running, {state_told(run)}" if run.state == "running" else state_told(run)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = seconds / 60
    if minutes < 1:
        return "less than a minute"
    return f"about {minutes:.0f} min" if minutes < 120 else f"about {minutes / 60:.0f} h"


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return ""


def _rounds(text: str) -> tuple[tuple[RoundFacts, ...], tuple[Picture, ...]]:
    with _drawing:
        return _drawn(text)


@lru_cache(DRAWN)
def _drawn(text: str) -> tuple[tuple[RoundFacts, ...], tuple[Picture, ...]]:
    """The rounds of a `rounds.jsonl` and their curves; none of a file that no run has written."""
    try:
        rounds = rounds_in(text)
        return rounds, curves(rounds)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return (), ()
