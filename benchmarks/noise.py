"""Numbers of noise: nanoseconds each, against NumPy's generators, which are no cryptographic ones.

Then the exact discrete Gaussian beside Cloister's normal numbers, block by block on one thread.

python benchmarks/noise.py
"""

import os
import statistics
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
from common import interleaved, machine, table
from numpy.typing import NDArray

from cloister.privacy.mechanisms import noise
from cloister.privacy.mechanisms.discrete import numpy_kernel, sampler
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.threads import BLOCK

NUMBERS = 6_500_000
TURNS, IN_A_ROW = 80, 12
"""How often each way of making blocks of noise is timed, and on how many: as many as 0.8 million parameters take."""


def contenders(dtype: type) -> dict[str, Callable[[NDArray], object]]:
    """Ways to add a normal number to every number of an array."""
    ours, pcg = GaussianNoise(), np.random.default_rng()
    sfc = np.random.Generator(np.random.SFC64())
    return {
        "Cloister, AES-128-CTR": lambda target: ours.add(target, 1.0),
        "Generator(PCG64)": lambda target: np.add(target, pcg.standard_normal(len(target), dtype), out=target),
        "Generator(SFC64)": lambda target: np.add(target, sfc.standard_normal(len(target), dtype), out=target),
        "np.random.normal (Flower)": lambda target: np.add(
            target, np.random.normal(0, 1.0, len(target)).astype(dtype), out=target
        ),
    }


def rows(dtype: type) -> list[list[str]]:
    """One line for every contender."""
    target = np.zeros(NUMBERS, dtype)
    seconds = interleaved(contenders(dtype), lambda: target, repeats=9)
    ours = next(iter(seconds.values()))
    return [
        [dtype.__name__, name, f"{1e9 * taken / NUMBERS:.2f}", f"{taken / ours:.1f}x", f"{1e9 * busy(dtype, name):.2f}"]
        for name, taken in seconds.items()
    ]


def busy(dtype: type, name: str) -> float:
    """Processor seconds a number, all threads together: what is left when another program is running."""
    target, action = np.zeros(NUMBERS, dtype), contenders(dtype)[name]
    action(target)
    start = time.process_time()
    for _ in range(5):
        action(target)
    return (time.process_time() - start) / 5 / NUMBERS


def kernels() -> list[ModuleType]:
    """NumPy's and, where it is installed, numba's."""
    fastest = sampler.kernel()
    return [numpy_kernel] if fastest is numpy_kernel else [numpy_kernel, fastest]


def makers() -> dict[str, tuple[Callable[[int], object], Callable[[int], object]]]:
    """Ways to make a block of noise in double precision or exactly: the numbers alone, and added to sums on a grid."""
    target, normal = np.zeros(BLOCK), GaussianNoise().maker()
    halves = BLOCK // noise.BLOCK
    found = {
        "normal, float64": (
            lambda turn: [normal.normals(halves * turn + half, noise.BLOCK, 1.0) for half in range(halves)],
            lambda turn: normal.add_on_grid(target, 1.0, tuple(range(halves * turn, halves * (turn + 1)))),
        )
    }
    for kernel in kernels():
        sampler.kernel = lambda kernel=kernel: kernel
        exact = DiscreteGaussian().maker()
        found[f"exact, {kernel.NAME}"] = (
            lambda turn, exact=exact: exact.integers(turn, BLOCK),
            lambda turn, exact=exact: exact.add(target, (turn,)),
        )
    return found


def on_one_thread() -> list[list[str]]:
    """One line for each maker: processor time a number in turns, the median and the least."""
    actions = {(name, at): action for name, both in makers().items() for at, action in enumerate(both)}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in actions}
    for turn in range(TURNS):
        for key, action in actions.items():
            start = time.process_time()
            for block in range(IN_A_ROW):
                action(IN_A_ROW * turn + block)
            seconds[key].append(1e9 * (time.process_time() - start) / IN_A_ROW / BLOCK)
    cells = {key: [f"{statistics.median(taken):.2f}", f"{min(taken):.2f}"] for key, taken in seconds.items()}
    return [[name, *cells[name, 0], *cells[name, 1]] for name, at in actions if at == 0]


def main() -> None:
    """Print the table."""
    machine()
    head = ["dtype", "generator", "ns a number", "of Cloister", "CPU ns a number"]
    table(head, rows(np.float32) + rows(np.float64))
    print(f"\n{IN_A_ROW} blocks of {BLOCK} numbers on one thread, {TURNS} times; load {os.getloadavg()[0]:.1f}\n")
    head = ["noise", "CPU ns a number, median", "least", "added to sums, median", "least"]
    table(head, on_one_thread())


if __name__ == "__main__":
    main()
