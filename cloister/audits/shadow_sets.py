"""Data of an attacker on a client: a part of its examples, and the choice of the most distinct client."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cloister.tasks.base import Examples

SHARE = 0.1
"""Share of the target's examples that the attacker has, as published."""
BLUR = 0.2
"""Standard deviation of the noise on a blurred shadow set, in units of its largest input, as published."""


def shadow_set(examples: Examples, seed: int) -> Examples:
    """Draw a tenth of the examples, at least one.

    Args:
        examples: of the target.
        seed: of the draw.
    """
    count = max(1, round(SHARE * len(examples)))
    return examples.take(np.sort(np.random.default_rng(seed).choice(len(examples), count, replace=False)))


def blurred(examples: Examples, seed: int) -> Examples:
    """Add Gaussian noise to the inputs, for an attacker with inexact data of the target.

    Args:
        examples: of the shadow set.
        seed: of the noise.
    """
    noise = np.random.default_rng(seed).normal(0, BLUR * np.abs(examples.x).max(), examples.x.shape)
    return replace(examples, x=(examples.x + noise).astype(examples.x.dtype))


def most_unlike(parts: Sequence[Examples], classes: int) -> int:
    """Return the client whose class shares differ most from those of all clients.

    Of equal ones, the largest client is returned.

    Args:
        parts: the examples of each client.
        classes: number of classes; 0: targets are numbers, and the largest client is returned.
    """

    def shares(y: np.ndarray) -> np.ndarray:
        return np.bincount(y.astype(np.int64), minlength=classes) / max(1, len(y))

    if not classes:
        return int(np.argmax([len(part) for part in parts]))
    everybody = shares(np.concatenate([part.y for part in parts]))
    apart = [(round(float(np.abs(shares(part.y) - everybody).sum()), 6), len(part)) for part in parts]
    return max(range(len(parts)), key=lambda number: apart[number])
