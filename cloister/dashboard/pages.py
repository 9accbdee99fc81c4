"""Page of the dashboard as HTML, rendered from a view."""

import time

from cloister.core.digits import at_least, at_most
from cloister.dashboard.template import FRAME, OVERVIEW, STYLE
from cloister.dashboard.views import View
from cloister.server.reports.html.filling import filled
from cloister.server.reports.status import RunState, state_told


def overview(view: View, connection: str, live: bool) -> str:
    """Return the page: findings, nodes, runs, budgets.

    Args:
        view: to be shown.
        connection: name of the SuperLink; empty: none is queried.
        live: whether the page shall renew itself.
    """
    snapshot = view.snapshot
    nodes, secret = snapshot.nodes, snapshot.hides_progress
    context = {
        "own_style": STYLE,
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.when)),
        "live": live and not secret,
        "secret": secret,
        "connection": connection,
        "found": view.found,
        "rejected": snapshot.run.rejected if snapshot.run else (),
        "nodes": nodes,
        "online": sum(node["status"] == "online" for node in nodes or ()),
        "runs": [{"name": name, "facts": state and _row(state)} for name, state in view.runs.items()],
        "details": {name: _details(state) for name, state in view.runs.items() if state is not None},
        "older": view.older,
        "spent": [
            {"ledger": ledger, "unit": unit, "share": f"{at_most(100 * share, 3)} %"}
            for (ledger, unit), share in snapshot.spent.items()
        ],
        "closed": [{"ledger": ledger, "unit": unit} for ledger, unit in snapshot.closed],
    }
    return filled(OVERVIEW, context, FRAME)


def _row(run: RunState) -> dict[str, str]:
    """Return the cells of a run in the table of runs."""
    # An ended run claims an ε. For a running one, the ledger so far has one.
    if run.claimed is not None:
        epsilon = at_most(run.claimed, 3) + (f" ({run.claimed_for})" if run.claimed_for != "client" else "")
    elif run.state != "running" or run.privacy == "none":
        epsilon = "none claimed"
    else:
        epsilon = "not told yet" if run.epsilon is None else f"{at_most(run.epsilon, 3)} so far"
    return {
        "task": run.task,
        "privacy": run.privacy,
        "round": f"{run.round}/{run.rounds}",
        "state": _state(run),
        "left": _left(run.seconds_left),
        "epsilon": epsilon,
        "little": run.worth,
    }


def _details(run: RunState) -> list[tuple[str, str]]:
    """Return the facts of `cloister status` about a run, without the unknown ones."""
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
        ("Replies that did not count", "; ".join(run.rejected)),
        ("ε that is claimed", claimed),
        ("Premises of the claim", run.premises),
        (
            "ε of the ledger",
            "" if run.epsilon is None else f"{at_most(run.epsilon, 3)}{little if run.claimed is None else ''}",
        ),
        ("Left of the budget", "" if run.budget_left is None else at_least(run.budget_left, 3)),
    ]
    return [(title, value) for title, value in facts if value]


def _state(run: RunState) -> str:
    return f"running, {state_told(run)}" if run.state == "running" else state_told(run)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = seconds / 60
    if minutes < 1:
        return "less than a minute"
    return f"about {minutes:.0f} min" if minutes < 120 else f"about {minutes / 60:.0f} h"
