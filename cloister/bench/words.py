"""Benchmark result as lines of plain text, for a terminal and for a pipe."""

from collections.abc import Iterator

from cloister.bench.clock import Times
from cloister.bench.machine import Machine
from cloister.bench.measure import Bench, Round
from cloister.bench.rows import Row
from cloister.core.terminal import UNBOUNDED, plain, table

INPUTS = "random numbers of the task's shapes; no data was read, nothing was sent, spent or written"
COLUMNS = ("", "without privacy", "with it", "times", "turns")


def render(found: Bench) -> list[str]:
    """Format all measurements as lines of plain text.

    Args:
        found: result on this machine.
    """
    config, sizes = found.config, found.sizes
    return [
        f"bench      {config.task.name}, {config.strategy.name}; {sizes.parameters:,} parameters, batches of "
        f"{sizes.batch_size}, {sizes.cohort} of {found.options.clients} clients a round",
        f"machine    {_machine(found.machine)}",
        f"load       {_load(found.machine.load)} before, {_load(found.load)} after, programs that run or wait",
        f"versions   {', '.join(f'{name} {version}' for name, version in found.machine.versions.items())}",
        f"inputs     {INPUTS}",
        "",
        "median (and quartiles) of turns",
        *(f"  {line}" for line in plain(table(COLUMNS, map(_cells, found.rows.values()), box=None), UNBOUNDED)),
        *(f"  {row.what}: cannot be done: {row.why}" for row in found.rows.values() if row.why),
        "",
        "bytes of the arrays of a message",
        f"  {sizes.down:,} down, {sizes.up:,} up",
        "",
        f"seconds of a round: {sizes.cohort} clients with {found.options.examples} examples each, {sizes.steps} steps; "
        "messages, scores and networks come on top",
        *(f"  {line}" for line in _rounds(found)),
    ]


def _machine(machine: Machine) -> str:
    memory = f", {machine.memory / 2**30:.0f} GiB" if machine.memory else ""
    return f"{machine.processor}, {machine.cores} cores{memory}"


def _load(load: float | None) -> str:
    return "unknown" if load is None else f"{load:.1f}"


def _cells(row: Row) -> tuple[str, ...]:
    plain, private = row.plain, row.private
    ratio = f"{private.ratio(plain):.3g}" if plain and private else ""
    timed = private or plain
    return row.what, _times(plain), _times(private), ratio, str(len(timed.seconds)) if timed else ""


def _times(times: Times | None) -> str:
    if times is None:
        return "-"
    low, high = times.spread
    unit, factor = ("ns", 1e9) if times.median < 1e-6 else ("ms", 1e3)
    return f"{_short(factor * times.median)} {unit} ({_short(factor * low)} to {_short(factor * high)})"


def _short(number: float) -> str:
    """Format three significant digits, without an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}"


def _rounds(found: Bench) -> Iterator[str]:
    privacy = found.config.privacy
    named = {
        "without privacy": found.plain,
        f"as configured (server {privacy.server.name}, clients {privacy.client.name})": found.configured,
    }
    for name, taken in named.items():
        yield f"{name}: {_round(taken)}"


def _round(taken: Round | None) -> str:
    if taken is None:
        return "cannot be done"
    return (
        f"{_short(taken.one_by_one)} one client after the other, {_short(taken.side_by_side)} with a machine like this "
        "one for each"
    )
