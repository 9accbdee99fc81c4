"""Normal numbers: nanoseconds each, against NumPy's generators, which are no cryptographic ones.

python benchmarks/noise.py
"""

import time
from collections.abc import Callable

import numpy as np
from common import interleaved, machine, table
from numpy.typing import NDArray

from cloister.privacy.mechanisms.noise import GaussianNoise

NUMBERS = 6_500_000


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


def main() -> None:
    """Print the table."""
    machine()
    head = ["dtype", "generator", "ns a number", "of Cloister", "CPU ns a number"]
    table(head, rows(np.float32) + rows(np.float64))


if __name__ == "__main__":
    main()
