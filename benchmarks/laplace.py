"""Laplace noise under the Euclidean norm on 1.2 million float32 parameters, against plain NumPy.

python benchmarks/laplace.py
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from common import count, extra_peak, interleaved, machine, table
from numpy.typing import NDArray

from cloister.privacy.mechanisms.laplace import LaplaceNoise

SHAPES = {
    "conv1": (3, 3, 1, 32),
    "conv1/bias": (32,),
    "conv2": (3, 3, 32, 64),
    "conv2/bias": (64,),
    "hidden": (9216, 128),
    "hidden/bias": (128,),
    "output": (128, 62),
    "output/bias": (62,),
}
"""1,206,590 parameters: the CNN of the task `mnist-writers` with 62 classes."""
EPSILON = 1e6
MEGABYTE = 1e6

Action = Callable[[NDArray], object]


def contenders() -> Mapping[str, Action]:
    """Ways to add one draw to a flat model, ours first."""
    ours = LaplaceNoise()
    return {
        "Cloister, AES-128-CTR": lambda model: ours.add(pieces(model), EPSILON),
        "np.random, float64": with_global_numpy,
        "Generator, float64": lambda model: with_generator(model, np.float64),
        "Generator, float32": lambda model: with_generator(model, np.float32),
    }


def pieces(model: NDArray) -> tuple[NDArray, ...]:
    """The model as its arrays."""
    return tuple(np.split(model, np.cumsum([math.prod(shape) for shape in SHAPES.values()])[:-1]))


def with_global_numpy(model: NDArray) -> None:
    """A radius times a normalised normal vector, straightforwardly."""
    direction = np.random.normal(size=len(model))
    model += (np.random.gamma(len(model), 1 / EPSILON) * direction / np.linalg.norm(direction)).astype(np.float32)


GENERATOR = np.random.default_rng()


def with_generator(model: NDArray, dtype: type) -> None:
    """The same with a Generator, scaled in place."""
    noise = GENERATOR.standard_normal(len(model), dtype)
    noise *= GENERATOR.gamma(len(model), 1 / EPSILON) / np.linalg.norm(noise)
    model += noise.astype(np.float32, copy=False)


def rows() -> list[list[str]]:
    """One line for every contender."""
    actions, model = contenders(), np.zeros(count(SHAPES), np.float32)
    seconds = interleaved(actions, lambda: model, repeats=41)
    ours = next(iter(seconds.values()))
    return [
        [name, f"{1e3 * taken:.1f}", f"{taken / ours:.1f}x", f"{peak(actions[name], model) / MEGABYTE:.1f}"]
        for name, taken in seconds.items()
    ]


def peak(action: Action, model: NDArray) -> int:
    """Bytes by which memory rises; a first call has loaded what stays."""
    action(model)
    return extra_peak(lambda: action(model))


def main() -> None:
    """Print the table."""
    machine()
    table(["Laplace noise", "ms", "of Cloister", "extra MB"], rows())


if __name__ == "__main__":
    main()
