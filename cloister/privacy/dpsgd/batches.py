"""Which examples take part in a step of DP-SGD, and the fixed shapes in which they are computed."""

import math
import os
from collections.abc import Callable, Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.errors import ConfigError

SMALL = 8
"""The rest of a batch is computed in pieces this many times smaller than a microbatch."""

Batch = NDArray[np.intp]
"""Indices of examples, without repetition; possibly none."""


def poisson(examples: int, rate: float, steps: int, seed: int | None = None) -> Iterator[Batch]:
    """Batches in which each example takes part with probability `rate`, independently of all others.

    This is what accountants mean by Poisson sampling. A batch may be empty, and must be stepped on all the same.

    Args:
        examples: n ≥ 0.
        rate: q, above 0 and at most 1.
        steps: number of batches.
        seed: None draws from the operating system. A number gives the same batches every time, for tests; whoever knows
            it knows who took part, and no amplification may be claimed.

    Raises:
        ConfigError: `rate` is not a probability above 0, or a number is negative.

    Source: Abadi et al. (2016), §3.1 (lots); on what goes wrong otherwise: Chua et al. (2024), arXiv:2403.17673.
    """
    _check(examples, steps)
    if not 0 < rate <= 1:
        raise ConfigError(f"sampling_rate must be above 0 and at most 1, got {rate}")
    draw, threshold = _uniform(seed), round(rate * 2.0**64)
    # A whole 2^64 does not fit into 64 bits: comparing with the last number that takes part does.
    return (np.flatnonzero(draw(examples) <= np.uint64(max(threshold, 1) - 1)) for _ in range(steps))


def shuffle(examples: int, batch_size: int, steps: int, seed: int | None = None) -> Iterator[Batch]:
    """Equal parts of a random order, a new order when one is used up: for comparison only.

    An accountant of Poisson sampling understates what these batches cost; they are accounted without amplification.

    Args:
        examples: n ≥ `batch_size`; the last n mod `batch_size` of an order sit out.
        batch_size: examples in each batch.
        steps: number of batches.
        seed: None draws from the operating system.

    Raises:
        ConfigError: there are fewer examples than one batch takes.
    """
    _check(examples, steps)
    if not 1 <= batch_size <= examples:
        raise ConfigError(f"batch_size must be from 1 to the {examples} examples, got {batch_size}")
    return _parts(examples, batch_size, steps, np.random.default_rng(seed))


def pieces(count: int, microbatch_size: int) -> list[int]:
    """Sizes of microbatches that hold `count` examples: whole ones, and small ones for the rest.

    Only two sizes are ever used, `microbatch_size` and `small(microbatch_size)`, so that a compiler sees two shapes.
    """
    whole, rest = divmod(count, microbatch_size)
    if 2 * rest > microbatch_size:
        whole, rest = whole + 1, 0
    return [microbatch_size] * whole + [small(microbatch_size)] * math.ceil(rest / small(microbatch_size))


def small(microbatch_size: int) -> int:
    """The smaller of the two sizes of `pieces`."""
    return math.ceil(microbatch_size / SMALL)


def _check(examples: int, steps: int) -> None:
    check.non_negative(examples=examples, steps=steps)


def _uniform(seed: int | None) -> Callable[[int], NDArray[np.uint64]]:
    """A source of independent uniform 64-bit numbers: AES in counter mode under a key of the operating system's."""
    if seed is not None:
        rng = np.random.default_rng(seed)
        return lambda count: rng.integers(0, 2**64, count, np.uint64)
    stream = Cipher(algorithms.AES(os.urandom(16)), modes.CTR(os.urandom(16))).encryptor()
    return lambda count: np.frombuffer(stream.update(bytes(8 * count)), np.uint64)


def _parts(examples: int, batch_size: int, steps: int, rng: np.random.Generator) -> Iterator[Batch]:
    per_order = examples // batch_size
    for step in range(steps):
        if step % per_order == 0:
            order = rng.permutation(examples)
        start = step % per_order * batch_size
        yield order[start : start + batch_size]
