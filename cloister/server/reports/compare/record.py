"""Comparison of runs as JSON."""

from cloister.server.reports.compare.comparison import Comparison, Group, Spread
from cloister.server.reports.compare.runs import Cost, RunSummary


def record(comparison: Comparison) -> dict[str, object]:
    """Return the comparison as a JSON object."""
    return {
        "score": comparison.score,
        "on-clients": comparison.on_clients,
        "groups": [_group(comparison, group) for group in comparison.groups],
        "notes": list(comparison.notes),
    }


def _group(comparison: Comparison, group: Group) -> dict[str, object]:
    score, on_clients = comparison.score, comparison.on_clients
    return {
        "name": group.name,
        "settings": dict(group.settings),
        "final": _spread(group.final(score, on_clients)),
        "best": _spread(group.best(score, on_clients)),
        "over-classes": {name: _spread(group.over_classes(name)) for name in comparison.over_classes},
        "claims": [_cost(cost) for cost in group.costs],
        "seconds": _spread(group.seconds),
        "runs": [_run(comparison, run) for run in group.runs],
    }


def _run(comparison: Comparison, run: RunSummary) -> dict[str, object]:
    return {
        "name": run.name,
        "directory": str(run.directory.resolve()),
        "seed": run.facts.seed,
        "ended": run.ended,
        "rounds": run.rounds,
        "final": run.final(comparison.score, comparison.on_clients),
    }


def _spread(spread: Spread | None) -> dict[str, object] | None:
    return None if spread is None else {"mean": spread.mean, "std": spread.std, "runs": spread.count}


def _cost(cost: Cost) -> dict[str, object]:
    if cost.kind is None:
        return {"status": cost.status}
    kind = cost.kind
    about = {"unit": kind.unit, "relation": kind.relation, "delta": kind.delta, "side": kind.side}
    return {"status": cost.status, "epsilon": cost.epsilon, **about}
