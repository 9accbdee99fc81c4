"""What the benchmarks share: model layouts, replies as they come off the network, clocks, memory and tables."""

import ctypes
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from machine import load
from machine import machine as machine
from numpy.typing import DTypeLike, NDArray

from cloister.simulation.grid import LocalGrid
from cloister.utils.wire import ARRAYS, EXAMPLES, METRICS

Shapes = Mapping[str, tuple[int, ...]]

MLP: Shapes = {"0": (784, 1000), "1": (1000,), "2": (1000, 10), "3": (10,)}
"""795,010 parameters."""
MRI: Shapes = {
    "conv1": (3, 3, 1, 32),
    "conv1/bias": (32,),
    "conv2": (3, 3, 32, 64),
    "conv2/bias": (64,),
    "conv3": (3, 3, 64, 128),
    "conv3/bias": (128,),
    "dense1": (100352, 64),
    "dense1/bias": (64,),
    "dense2": (64, 32),
    "dense2/bias": (32,),
    "dense3": (32, 4),
    "dense3/bias": (4,),
}
"""6,517,476 parameters: the CNN of the Alzheimer MRI task."""


def count(shapes: Shapes) -> int:
    """The number of parameters."""
    return sum(int(np.prod(shape)) for shape in shapes.values())


def model(shapes: Shapes, seed: int = 0, dtype: DTypeLike = np.float32) -> dict[str, NDArray]:
    """Weights to begin with."""
    rng = np.random.default_rng(seed)
    return {name: 0.05 * rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def stock_record(arrays: Mapping[str, NDArray]) -> ArrayRecord:
    """The arrays as Flower inflates them from the network: its own `Array`s, each over bytes of its own."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = Array(array)
    return record


def trained(sent: Mapping[str, NDArray], clients: int, step: float = 0.01) -> Iterable[dict[str, NDArray]]:
    """A model per client: what was sent plus a random update. Updates share one pool of numbers, at other offsets."""
    longest = max(array.size for array in sent.values())
    pool = np.random.default_rng(1).standard_normal(longest + 64 * clients).astype(np.float32) * np.float32(step)
    for client in range(clients):
        yield {
            name: array + pool[64 * client : 64 * client + array.size].reshape(array.shape).astype(array.dtype)
            for name, array in sent.items()
        }


class Federation:
    """The replies of one training round, prepared once; every strategy under test gets the same."""

    def __init__(self, shapes: Shapes, clients: int) -> None:
        """Have every client train: a model of these shapes, sent to so many."""
        quiet()
        self.grid = LocalGrid(lambda message, context: message, {}, [{}] * clients)
        sent = model(shapes)
        self.sent = stock_record(sent)
        self.records = [stock_record(arrays) for arrays in trained(sent, clients)]
        asked = [Message(RecordDict(), node, MessageType.TRAIN) for node in self.grid.get_node_ids()]
        self.replies = [Message(RecordDict(), reply_to=message) for message in asked]

    def fresh(self) -> list[Message]:
        """The replies with bytes of their own, as after an arrival: Flower's wrapper puts others in their place."""
        for message, record in zip(self.replies, self.records, strict=True):
            message.content = RecordDict({ARRAYS: _copied(record), METRICS: MetricRecord({EXAMPLES: 1.0})})
        return self.replies


def _copied(record: ArrayRecord) -> ArrayRecord:
    copy = ArrayRecord()
    for name, array in record.items():
        copy[name] = Array(array.dtype, array.shape, array.stype, bytes(memoryview(array.data)))
    return copy


def quiet() -> None:
    """Silence Flower, which writes a line per reply."""
    logging.getLogger("flwr").setLevel(logging.ERROR)


def interleaved(
    actions: Mapping[str, Callable[[Any], object]], before: Callable[[], Any] = lambda: None, repeats: int = 5
) -> dict[str, float]:
    """Median seconds of each action, run in turns so that a slow moment of the machine hits all of them.

    Each action takes what `before` returns; neither that nor freeing what the action returns is in the time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            prepared = before()
            gc.collect()
            start = time.perf_counter()
            result = action(prepared)
            elapsed = time.perf_counter() - start
            del result
            if turn:
                seconds[name].append(elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}


def extra_peak(action: Callable[[], object]) -> int:
    """Bytes by which the resident memory of this process rises above where it stands, at most, during `action`."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    action()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def in_subprocess(code: str, *arguments: str) -> Any:
    """What `code` prints last, as JSON, in a fresh interpreter that finds these benchmarks."""
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table, and how busy the machine was in the end."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines) + f"\n\nload {load()} at the end\n", flush=True)
