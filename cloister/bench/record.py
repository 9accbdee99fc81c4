"""Benchmark result as JSON, with times in seconds."""

from dataclasses import asdict

from cloister.bench.clock import Times
from cloister.bench.measure import Bench, Round
from cloister.bench.rows import Row
from cloister.bench.words import INPUTS


def record(found: Bench) -> dict[str, object]:
    """Return all measurements as plain JSON values.

    Args:
        found: result on this machine.
    """
    config, sizes = found.config, found.sizes
    return {
        "task": config.task.name,
        "strategy": config.strategy.name,
        "server": config.privacy.server.name,
        "client": config.privacy.client.name,
        "clients": found.options.clients,
        "examples": found.options.examples,
        "inputs": INPUTS,
        "machine": asdict(found.machine) | {"load-after": found.load},
        "sizes": {name.replace("_", "-"): size for name, size in asdict(sizes).items()},
        "rows": {name: _row(row) for name, row in found.rows.items()},
        "round": {"plain": _round(found.plain), "configured": _round(found.configured)},
    }


def _row(row: Row) -> dict[str, object]:
    ratio = row.private.ratio(row.plain) if row.private and row.plain else None
    return {
        "what": row.what,
        "plain": _times(row.plain),
        "private": _times(row.private),
        "ratio": ratio,
        "why": row.why,
    }


def _times(times: Times | None) -> dict[str, float] | None:
    if times is None:
        return None
    low, high = times.spread
    return {"median": times.median, "lower-quartile": low, "upper-quartile": high, "turns": len(times.seconds)}


def _round(taken: Round | None) -> dict[str, float] | None:
    return None if taken is None else {"one-by-one": taken.one_by_one, "side-by-side": taken.side_by_side}
