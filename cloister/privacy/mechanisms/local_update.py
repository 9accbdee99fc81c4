"""Release of a client's update: bounded, noised and added to the server's model, without a copy of the update.

Every number of the update is computed twice from the trained and the sent array, block by block in the cache: for its
norm, and for its noise. Gaussian noise is exact, on integers (`released_whole`); Laplace noise is continuous
(`released`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.core.arrays import Row
from cloister.core.errors import PrivacyError
from cloister.core.threads import Span, for_each_span, spans
from cloister.privacy.mechanisms.discrete import sampler
from cloister.privacy.mechanisms.grid import SHORTER, Grid
from cloister.privacy.mechanisms.keystream import Places
from cloister.privacy.mechanisms.noise import BLOCK, GaussianNoise, Maker

NORM_ERROR = 2.0**-30
"""Bound on the relative error of a norm and of the subsequent scaling, in double precision.

A sum of n squares in any order errs by less than n·2⁻⁵³ of itself (Higham, 2002, §3.1): 2⁻³⁸ for a block of 2¹⁵
numbers. `math.hypot` joins blocks with an error of an ulp; the factor and each product add one more.
"""
MIN_FACTOR = 2.0**-1000
"""Least factor: a smaller one lacks accurate bits and could round up, so that its update counts as zero."""
NOT_THE_ARRAYS = "the trained arrays are not those that training began with"
NOT_FINITE = "training has diverged: the update is not finite"
Arrays = Mapping[str, NDArray]
Sent = dict[str, NDArray]
"""Arrays that the client sends in place of a trained model, by name."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """Factor and continuous noise, if any, for a part of an update.

    Attributes:
        factor: of the update, from 0 to 1.
        std: standard deviation of the added normals, ≥ 0.
        step: of the grid to which the sums are rounded, a power of two; ignored without noise.
    """

    factor: float
    std: float = 0.0
    step: float = 1.0


def factor_for(norm: float, bound: float) -> float:
    """Return the factor from this norm into the ball, including its rounding.

    Args:
        norm: of the update, finite.
        bound: radius of the ball, > 0, in the same units.
    """
    factor = bound / max(norm * (1 + NORM_ERROR), bound)
    return factor if factor > MIN_FACTOR else 0.0


def released(
    trained: Arrays,
    start: Arrays,
    noise: GaussianNoise,
    per_layer: bool,
    scale: Callable[[int, float], Scale],
    tell: Tell | None,
) -> Sent:
    """Return start + factor·update + noise, with one scale or one for each array.

    Args:
        trained, start, noise, tell: as in `LocalMechanism.release`.
        per_layer: whether every array is a part.
        scale: returns the scale of a part, from its number of parameters, above 0, and the norm of its update.
    """
    update, sent, targets = _begun(trained, start, tell)
    layers = range(len(targets))
    for part in [[layer] for layer in layers] if per_layer else [list(layers)]:
        size = sum(targets[layer].size for layer in part)
        if size:
            how = scale(size, math.hypot(*(update.norms[layer] for layer in part)))
            _write(update, {layer: targets[layer] for layer in part}, how, noise)
    return sent


def released_whole(trained: Arrays, start: Arrays, noise: GaussianNoise, grid: Grid, tell: Tell | None) -> Sent:
    """Return start + (truncated factor·update + exact noise)·step, all arrays together.

    The update is truncated toward zero to whole steps.

    Args:
        trained, start, noise, tell: as in `LocalMechanism.release`.
        grid: of the release; the update is clipped to its bound.

    Guarantee: noise is added to integers with Σk² ≤ D², which is verified. If it fails, the update is shortened, and
        counts as zero if it fails again.
    """
    update, sent, targets = _begun(trained, start, tell)
    source = sampler.DiscreteGaussian(grid.scale, noise)
    places = source.places(spans([piece.size for piece in update.start], BLOCK))
    factor = factor_for(math.hypot(*update.norms), grid.bound)
    for share in (1.0, SHORTER, 0.0):
        # Overwritten values have not left the process; the rewritten release has the same noise.
        if grid.contains(_write_whole(update, targets, share * factor, grid, source, places)):
            break
    return sent


def _write_whole(
    update: "_Update",
    targets: Sequence[NDArray],
    factor: float,
    grid: Grid,
    source: sampler.DiscreteGaussian,
    places: Mapping[Span, Places],
) -> float:
    """Write start + (whole steps of factor·update + noise)·step.

    Return the sum of the squares of these steps.
    """
    squares = dict.fromkeys(places, 0.0)

    def write(span: Span, workspace: tuple[sampler.Maker, NDArray]) -> None:
        maker, scratch = workspace
        here = update.of_span(span, scratch)
        with np.errstate(over="ignore"):
            here *= factor
            here *= grid.steps / grid.bound
            np.trunc(here, out=here)
            squares[span] = float(np.vdot(here, here))
        maker.add(here, places[span])
        here *= grid.step
        update.put(here, span, targets[span.layer])

    for_each_span(list(places), write, lambda: (source.maker(), np.empty(BLOCK)))
    return sum(squares.values())


def _begun(trained: Arrays, start: Arrays, tell: Tell | None) -> tuple["_Update", Sent, list[NDArray]]:
    """Return the update, empty arrays to send, and flat views of these."""
    for name, array in start.items():
        # The start is public, and so is the refusal.
        if array.dtype not in (np.float16, np.float32, np.float64):
            raise PrivacyError(
                f"array {name!r} must be float16, float32 or float64 to carry noise, found {array.dtype}"
            )
    update = _Update.of(trained, start, tell)
    sent = {name: np.empty(array.shape, array.dtype) for name, array in start.items()}
    return update, sent, [array.reshape(-1) for array in sent.values()]


@dataclass(frozen=True)
class _Update:
    """Update Δ = trained - start, computed on demand, and the norms of its arrays.

    Attributes:
        trained, start: flat, finite, of the same sizes.
        norms: ‖Δ_l‖ of each array, finite, without their rounding.
    """

    trained: Row
    start: Row
    norms: Sequence[float]

    @classmethod
    def of(cls, trained: Arrays, start: Arrays, tell: Tell | None) -> "_Update":
        """Return the update, or the zero update in place of an invalid one.

        Args:
            trained, start, tell: as in `LocalMechanism.release`.

        Raises:
            PrivacyError: the start is not finite.
        """
        before, reason = tuple(np.ravel(array) for array in start.values()), NOT_THE_ARRAYS
        if trained.keys() == start.keys() and all(
            trained[name].shape == array.shape and trained[name].dtype.kind == "f" for name, array in start.items()
        ):
            after = tuple(np.ravel(trained[name]) for name in start)
            norms, reason = _norms(after, before), NOT_FINITE
            if all(map(math.isfinite, norms)):
                return cls(after, before, norms)
        if not all(np.isfinite(piece).all() for piece in before):
            raise PrivacyError("the model that was sent has NaN or infinite numbers: nothing can be released from it")
        if tell is not None:
            tell(reason)
        return cls(before, before, [0.0] * len(before))

    def of_span(self, span: Span, scratch: NDArray) -> NDArray:
        """Return the update's numbers in a span, in double precision.

        Args:
            span: of the arrays.
            scratch: flat, of double precision and at least as long as the span: memory of the result.
        """
        out = scratch[: len(span)]
        return np.subtract(span.of(self.trained), span.of(self.start), out=out, dtype=np.float64, casting="unsafe")

    def put(self, noised: NDArray, span: Span, target: NDArray) -> None:
        """Write start + noised numbers on the grid.

        Args:
            noised: the numbers of the span, in double precision; they are overwritten.
            span: of the arrays.
            target: the array to send, flat.
        """
        with np.errstate(over="ignore"):
            noised += span.of(self.start)
            # Saturated, not infinite: the server's screening would reveal a client's overflow.
            largest = float(np.finfo(target.dtype).max)
            np.clip(noised, -largest, largest, out=target[span.start : span.stop], casting="same_kind")


def _norms(trained: Row, start: Row) -> list[float]:
    """Return ‖trained - start‖₂ of each array; it may be NaN or infinite."""
    update, places = _Update(trained, start, ()), spans([piece.size for piece in start], BLOCK)
    found = dict.fromkeys(places, 0.0)

    def measure(span: Span, scratch: NDArray) -> None:
        with np.errstate(all="ignore"):
            found[span] = _norm(update.of_span(span, scratch))

    for_each_span(places, measure, lambda: np.empty(BLOCK))
    norms: list[list[float]] = [[] for _ in start]
    for span, norm in found.items():
        norms[span.layer].append(norm)
    return [math.hypot(*of_layer) for of_layer in norms]


def _norm(block: NDArray) -> float:
    """Return the Euclidean norm of doubles of any size.

    If squares leave the range, the block is scaled by a power of two first.
    """
    square = float(np.vdot(block, block))
    # Well inside the range of doubles: no relevant square has vanished or overflowed.
    if 2.0**-900 < square < 2.0**1000:
        return math.sqrt(square)
    peak = max(float(block.max()), -float(block.min()))
    if not (peak and math.isfinite(peak)):
        return peak
    exponent = math.frexp(peak)[1]
    scaled = np.ldexp(block, -exponent)
    return float(np.ldexp(math.sqrt(np.vdot(scaled, scaled)), exponent))


def _write(update: _Update, targets: Mapping[int, NDArray], how: Scale, noise: GaussianNoise) -> None:
    """Write start + factor·update + noise to the targets, the start last."""
    sizes = [piece.size if layer in targets else 0 for layer, piece in enumerate(update.start)]
    places = noise.places(spans(sizes, BLOCK))

    def write(span: Span, workspace: tuple[Maker, NDArray]) -> None:
        maker, scratch = workspace
        here = update.of_span(span, scratch)
        here *= how.factor
        maker.add_on_grid(here, how.std, places[span], how.step)
        update.put(here, span, targets[span.layer])

    for_each_span(list(places), write, lambda: (noise.maker(), np.empty(BLOCK)))
