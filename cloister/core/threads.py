"""Work that several threads share: calls, and long arrays in spans that fit a core's cache."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from numpy.typing import NDArray

BLOCK = 1 << 16
"""Numbers in a span: 256 KiB of float32, and its sum in double precision fits in a core's cache beside it. Shorter
stretches of a row keep starting the memory's prefetching anew."""
THREADS = min(4, os.cpu_count() or 1)
"""More would wait for the memory."""
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
        """The numbers themselves: a view."""
        return row[self.layer][self.start : self.stop]


def spans(sizes: Sequence[int], width: int = BLOCK) -> list[Span]:
    """Cut flat arrays into spans: every number once, array by array, none across the end of an array.

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
    places: Sequence[Span],
    work: Callable[[Span, Workspace], None],
    workspace: Callable[[], Workspace],
    cost: int = 1,
) -> None:
    """Do some work on every span: on several threads, each taking the next one, where there is enough to do.

    NumPy lets go of the interpreter's lock while it computes. The threads end with the call: what a process holds on
    to would be missing in one forked from it. Which thread comes to which span is chance, and must not show in what is
    computed: spans are independent of each other, and whatever is numbered is numbered beforehand.

    Args:
        places: the spans, each of which is worked on once.
        work: called with a span and the workspace of the thread that has taken it.
        workspace: makes what one thread needs for itself, such as memory that it uses for one span after another.
        cost: how many numbers the work goes over for one number of a span.
    """
    waiting = iter(places)
    threads = min(THREADS, len(places), cost * sum(map(len, places)) // WORTH_A_THREAD)
    # Made on this thread: the allocator would keep what another takes, for that one alone.
    workspaces = [workspace() for _ in range(max(1, threads))]

    def take(mine: Workspace) -> None:
        for span in waiting:
            work(span, mine)

    if threads < 2:
        return take(workspaces[0])
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(take, workspaces))


def in_threads(work: Callable[[Task], Result], tasks: Sequence[Task], threads: int) -> Iterator[Result]:
    """Yield what some work gives for each task, in the order of the tasks.

    Args:
        work: called with a task.
        tasks: independent of each other.
        threads: how many at the same time.
    """
    if min(threads, len(tasks)) < 2:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(min(threads, len(tasks))) as pool:
        yield from pool.map(work, tasks)
