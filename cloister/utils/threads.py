"""Work shared by several threads, and the free memory for it."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from numpy.typing import NDArray

BLOCK = 1 << 16
"""Numbers in a span: 256 KiB of float32. A core's cache also holds its sum in double precision. Shorter spans would
restart the memory's prefetching more often."""
THREADS = min(4, os.cpu_count() or 1)
"""Most threads; memory bandwidth limits the use of more."""
WORTH_A_THREAD = 1 << 20
"""Numbers below which a thread costs more than it gains."""

Workspace = TypeVar("Workspace")
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Span:
    """The numbers `start` to `stop` of array number `layer` of a row."""

    layer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, row: Sequence[NDArray]) -> NDArray:
        """Return a view of these numbers."""
        return row[self.layer][self.start : self.stop]


def spans(sizes: Sequence[int], width: int = BLOCK) -> list[Span]:
    """Cut flat arrays into spans that cover every number once, each within one array.

    Args:
        sizes: numbers in each array.
        width: most numbers in a span, > 0.
    """
    return [
        Span(layer, start, min(start + width, size))
        for layer, size in enumerate(sizes)
        for start in range(0, size, width)
    ]


def for_each_span(
    places: Sequence[Span], work: Callable[[Span, Workspace], None], workspace: Callable[[], Workspace], cost: int = 1
) -> None:
    """Run work on every span, on several threads if there is enough of it.

    NumPy releases the interpreter's lock while it computes. The threads end with the call, since a forked process would
    lack them. The assignment of spans to threads is random, and must not affect results: the work on one span must be
    independent of the work on others, and any numbering must precede it.

    Args:
        places: the spans; each is worked on once.
        work: called with a span and the workspace of its thread.
        workspace: makes the private data of one thread, such as memory that it reuses for each span.
        cost: numbers that the work reads per number of a span.
    """
    waiting = iter(places)
    threads = min(THREADS, len(places), cost * sum(map(len, places)) // WORTH_A_THREAD)
    # Made on this thread: the allocator would reserve memory of another thread for that thread alone.
    workspaces = [workspace() for _ in range(max(1, threads))]

    def take(mine: Workspace) -> None:
        for span in waiting:
            work(span, mine)

    if threads < 2:
        return take(workspaces[0])
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(take, workspaces))


def in_threads(work: Callable[[Task], Result], tasks: Sequence[Task], threads: int) -> Iterator[Result]:
    """Yield the result of the work for each task, in the order of the tasks.

    Args:
        work: called with a task.
        tasks: independent of each other.
        threads: number of concurrent threads.
    """
    if min(threads, len(tasks)) < 2:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(min(threads, len(tasks))) as pool:
        yield from pool.map(work, tasks)


VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller in a line of /proc/self/cgroup: the folder of its groups below /sys/fs/cgroup, the files of limit
and usage, and the field for reclaimable cache within the usage. The empty controller is version 2."""


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping or being killed.

    This is the minimum of the machine's available memory and the remainder of each control group.

    Args:
        root: parent of `proc` and `sys`.

    Returns:
        None if the system does not report it, as on systems other than Linux.
    """
    left = [1024 * kilobytes for kilobytes in _field(root / "proc/meminfo", "MemAvailable:")]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, own = line.split(":", 2)
        for controller in {*controllers.split(",")} & VERSIONS.keys():
            below, limit, usage, cache = VERSIONS[controller]
            top = root / "sys/fs/cgroup" / below
            group = top / own.lstrip("/")
            for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
                for maximum, used in zip(_field(folder / limit), _field(folder / usage), strict=False):
                    left.append(maximum - used + sum(_field(folder / "memory.stat", cache)))
    return max(0, min(left)) if left else None


def _field(path: Path, name: str = "") -> list[int]:
    """Return the integer after a name, or without a name that in the first line; empty if absent."""
    words = [line.split() for line in _lines(path)]
    if name:
        words = [line[1:] for line in words if line[:1] == [name]]
    return [int(line[0]) for line in words[:1] if line and line[0].isdigit()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
