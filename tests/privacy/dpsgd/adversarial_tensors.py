"""Inputs and deltas of layers as a hostile model makes them, and how far a unit moves the sum that is released.

Kernels are tried directly: what a layer is given is drawn, not computed. A case is one unit that joins or leaves.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from cloister.privacy.dpsgd import noise
from cloister.privacy.dpsgd.forms import of_positions, outer, pairs, whole
from cloister.privacy.dpsgd.in_rows import clip
from cloister.privacy.dpsgd.noise import overstatement

UNITS = 8
BOUNDS = (1e-12, 1e-6, 1.0, 1e6)
COARSE = 2.0**19
"""A noise multiplier whose grid has 32 steps in D: its roundings show beside those of the kernels."""


@dataclass(frozen=True)
class Kind:
    """A kernel and the shapes that it is tried on.

    Attributes:
        inputs, deltas: of one row.
        part: (inputs, deltas) -> Part; takes `deltas` alone as gradients if `inputs` is empty.
        each: rows of a unit.
    """

    inputs: tuple[int, ...]
    deltas: tuple[int, ...]
    part: Any
    each: int = 1


def one_by_one(_, deltas):
    return whole(tf.reduce_sum(tf.reshape(deltas, [UNITS, -1, *deltas.shape[1:]]), axis=1))


def by_positions(kind):
    def part(inputs, deltas):
        return kind(*(tf.reshape(tensor, [UNITS, -1, tensor.shape[-1]]) for tensor in (inputs, deltas)))

    return part


KINDS = {
    "outer": Kind((1, 7), (1, 5), by_positions(outer)),
    "gram": Kind((4, 7), (4, 5), by_positions(pairs)),
    "gram of groups": Kind((2, 7), (2, 5), by_positions(pairs), each=3),
    "dense one by one": Kind((4, 3), (4, 3), by_positions(of_positions)),
    "dense of groups": Kind((3,), (3,), by_positions(of_positions), each=3),
    "one by one": Kind((), (4, 6), one_by_one),
    "one by one in groups": Kind((), (4, 6), one_by_one, each=2),
}
"""Normalizations are held one by one, as gradients."""


def drawn(rng, shape, rows, each):
    """Rows of their own scales, of numbers that cancel, saturate, underflow or are not finite."""
    scale = 10.0 ** rng.uniform(-44, 38.5, (rows, *[1] * len(shape)))
    if rng.random() < 0.5:
        scale = 10.0 ** rng.uniform(-3, 3) * np.ones_like(scale)
    values = rng.standard_normal((rows, *shape)) * scale
    style = rng.integers(7)
    if style == 1 and shape and shape[0] % 2 == 0:
        values[:, shape[0] // 2 :] = -values[:, : shape[0] // 2] * (1 + rng.integers(0, 2) * 1e-6)
    if style == 2:
        values *= 10.0 ** rng.uniform(-30, 0, values.shape)
    if style == 3:
        values[rng.integers(rows)] = rng.choice([np.nan, np.inf, -np.inf])
    if style == 4:
        values = np.sign(values) * scale
    if style == 5 and each > 1:
        values[1::each] = -values[0::each]
    if style == 6 and shape:
        values = np.repeat(values[:, :1], shape[0], axis=1)
    return np.clip(values, -3.4e38, 3.4e38).astype(np.float32)


def opposite(rng, kind, bound):
    """Large inputs and small deltas or the other way round: gradients are about as long as the bound, or longer."""
    power, above = rng.uniform(-38, 38), rng.uniform(-1, 4)
    of = lambda shape: rng.standard_normal((UNITS * kind.each, *shape))  # noqa: E731
    inputs = of(kind.inputs) * 10.0**power
    deltas = of(kind.deltas) * bound * 10.0 ** (above - power * bool(kind.inputs))
    return tuple(np.clip(tensor, -3.4e38, 3.4e38).astype(np.float32) for tensor in (inputs, deltas))


def cancel(rng, inputs, deltas):
    """Let the second half of a row's positions take away what the first half adds, but for a small part."""
    if inputs.ndim > 2:
        inputs[:] = inputs.reshape(len(inputs), -1, inputs.shape[-1])[:, :1].reshape(
            len(inputs), *[1] * (inputs.ndim - 2), inputs.shape[-1]
        )
        half = deltas.shape[1] // 2
        less = -deltas[:, :half] * (1 + 10.0 ** rng.uniform(-8, -2))
        deltas[:, half : 2 * half] = np.clip(less, -3.4e38, 3.4e38)


def search(name, cases, seed=0):
    """The farthest that a unit moves the sum, over so many cases."""
    rng = np.random.default_rng(seed)
    return max(farthest(name, rng) for _ in range(-(-cases // UNITS)))


@cache
def compiled(name):
    """The sums of everybody and of all but each in turn, compiled once for each kernel."""
    kind, rows = KINDS[name], UNITS * KINDS[name].each
    signature = [tf.TensorSpec([rows, *shape], tf.float32) for shape in (kind.inputs, kind.deltas)]
    present = [np.arange(UNITS) != left for left in range(-1, UNITS)]

    def sums(inputs, deltas, bound):
        part = kind.part(inputs, deltas)
        clips = [clip(part.squares, real, bound) for real in present]
        return [part.weighted_sum(part.held, factors) for factors, *_ in clips]

    return tf.function(sums, input_signature=[*signature, tf.TensorSpec([], tf.float64)], autograph=False)


def farthest(name, rng):
    """How far a unit of one drawn batch moves the sum, beside S, or whole numbers, beside D: the most of `UNITS`."""
    kind, bound = KINDS[name], BOUNDS[rng.integers(len(BOUNDS))]
    inputs, deltas = (drawn(rng, shape, UNITS * kind.each, kind.each) for shape in (kind.inputs, kind.deltas))
    if rng.random() < 0.4:
        inputs, deltas = opposite(rng, kind, bound)
    if kind.inputs and rng.random() < 0.3:
        cancel(rng, inputs, deltas)
    given = tf.constant(bound / (1 + overstatement(UNITS, UNITS)), tf.float64)
    sums = [[np.asarray(total) for total in some] for some in compiled(name)(inputs, deltas, given)]
    grid = noise.grid_of(bound, COARSE, sum(total.size for total in sums[0]))
    on_grid = [[np.rint(total * (1 / grid.step)) for total in some] for some in sums]
    apart, steps = (max(distance(some[0], one) for one in some[1:]) for some in (sums, on_grid))
    return max(apart / bound, steps / grid.steps)


def distance(left, right):
    """In double precision."""
    apart = [np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in zip(left, right, strict=True)]
    return np.sqrt(sum(np.square(piece).sum() for piece in apart))
