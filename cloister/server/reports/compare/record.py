"""Comparison of runs as JSON."""

from cloister.server.reports.compare.comparison import Comparison, Spread
from cloister.server.reports.compare.runs import Cost


def record(comparison: Comparison) -> dict[str, object]:
    """Return the comparison as a JSON object."""
    score, on_clients = comparison.score, comparison.on_clients
    groups = [
        {
            "name": group.name,
            "settings": dict(group.settings),
            "final": _spread_facts(group.final(score, on_clients)),
            "best": _spread_facts(group.best(score, on_clients)),
            "over-classes": {name: _spread_facts(group.over_classes(name)) for name in comparison.over_classes},
            "claims": [_cost(cost) for cost in group.costs],
            "seconds": _spread_facts(group.seconds),
            "runs": [
                {
                    "name": run.name,
                    "directory": str(run.directory.resolve()),
                    "seed": run.facts.seed,
                    "ended": run.ended,
                    "rounds": run.rounds,
                    "final": run.final(score, on_clients),
                }
                for run in group.runs
            ],
        }
        for group in comparison.groups
    ]
    return {"score": score, "on-clients": on_clients, "groups": groups, "notes": list(comparison.notes)}


def _spread_facts(spread: Spread | None) -> dict[str, object] | None:
    return None if spread is None else {"mean": spread.mean, "std": spread.std, "runs": spread.count}


def _cost(cost: Cost) -> dict[str, object]:
    if cost.kind is None:
        return {"status": cost.status}
    kind = cost.kind
    about = {"unit": kind.unit, "relation": kind.relation, "delta": kind.delta, "side": kind.side}
    return {"status": cost.status, "epsilon": cost.epsilon, **about}
