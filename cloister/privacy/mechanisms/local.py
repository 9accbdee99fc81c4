"""Mechanisms that a client applies to its own update, with a guarantee that needs no trust in the server.

    Δ = trained - start  ─▶  bounded to a ball  ─▶  + noise, on a public grid  ─▶  + start  ─▶  the model's own dtype

There is no copy of the update. Every number of it is computed twice from the trained and the sent array, block by
block in the cache: for its norm, and for its noise. Gaussian noise is exact, on integers (`released_whole`); Laplace
noise is continuous (`released`).

The server chooses the start. The trained model depends on the data and on the server. The guarantee holds for every
pair of them, since noise is added to a point of a ball that is fixed beforehand. It rests on three points:

- Noise is added to the bounded update, on a public grid, and the start only afterwards. Around a start of 10³⁸,
  neighbouring floats are 10³¹ apart: added first, it would turn the smallest difference of two updates into one that
  no noise covers. Added last, it is post-processing, and so are the rounding to the model's dtype and its saturation.
- The norm is that of the true update, overstated by its rounding, for every number that a double holds. Gaussian noise
  is added to integers whose norm is verified.
- An invalid update (NaN, infinite, of other arrays) counts as the zero update: it gets the same noise, so that the
  reply has the same form as any other.

| edge case | the client sends |
|---|---|
| zero update | the start and the noise; under `PublishedLaplace` the start alone |
| NaN, infinite, other arrays | as for a zero update; the node's own log has the reason |
| NaN or infinite start, or one with other dtypes than floats | refused: the start is public, and so is the refusal |
| a start of single numbers, or with empty arrays | noise on the existing numbers |
| noise multiplier 0 | the bounded update, on no grid; the event is `Unaccounted` |
| a sum beyond the dtype | the largest number of the dtype, never infinity |
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting.events import Event, Gaussian, Laplace, Pure, Unaccounted
from cloister.privacy.accounting.vocabulary import MIN_MULTIPLIER
from cloister.privacy.claims.premises import BUNDLE, CRYPTOGRAPHY, Contributor
from cloister.privacy.mechanisms.discrete import sampler
from cloister.privacy.mechanisms.grid import SHORTER, Grid
from cloister.privacy.mechanisms.laplace import deviation, public_step
from cloister.privacy.mechanisms.noise import BLOCK, GaussianNoise, Maker, Places, refuse_beyond
from cloister.utils import check
from cloister.utils.arrays import Row
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.threads import Span, for_each_span, spans

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


def fits(trained: Arrays, start: Arrays) -> bool:
    """Return whether trained arrays have the names and shapes of those of the start, and hold floats."""
    return trained.keys() == start.keys() and all(
        trained[name].shape == array.shape and trained[name].dtype.kind == "f" for name, array in start.items()
    )


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


class LocalMechanism(Contributor, ABC, abstract=True):
    """What a client may do to its update, as a value."""

    @property
    def ball(self) -> float:
        """Return the radius of the ball that holds a whole bounded update; 0: there is none."""
        return 0.0

    @abstractmethod
    def release(self, trained: Arrays, start: Arrays, noise: GaussianNoise, tell: Tell | None = None) -> Sent:
        """Return the arrays to send in place of a trained model.

        Args:
            trained: the arrays after training: any memory order, any float dtype. Never changed, never sent.
            start: the arrays that the server sent, finite, of float16, float32 or float64.
            noise: source of the normal numbers.
            tell: receives the reason if the update is invalid and counts as zero; for the node's own log.

        Returns:
            New arrays with the names, shapes and dtypes of `start`, finite.

        Raises:
            PrivacyError: the start is not finite, has another dtype, or needs noise beyond the range of numbers.
        """

    @abstractmethod
    def events(self, parameters: int) -> list[Event]:
        """Return the events of one release of this size, fixed before training.

        They are the same for every update.

        Raises:
            ConfigError, PrivacyError: this mechanism cannot noise a model of this size.
        """

    @abstractmethod
    def caveats(self) -> list[str]:
        """Return the reasons why its figures are no guarantee; empty if they are."""

    @abstractmethod
    def parameters(self) -> dict[str, float | bool]:
        """Return its parameters, by configuration key."""


@dataclass(frozen=True)
class LocalLaplace(LocalMechanism):
    """Project the update onto a ball and add Laplace noise: pure local differential privacy for a whole client.

    Args:
        radius: R > 0 of the ball, in units of the weights.
        noise_multiplier: ν, 0 or at least `MIN_MULTIPLIER`; the noise has density ∝ exp(-ε‖x‖) with ε = p/(ν·R), and a
            mean length of p/ε = ν·R.
        per_layer: whether every array has a ball of this radius and a draw of noise of its own.

    Guarantee: any two outputs of the projection are at most 2R apart, and any output is at most R from that of a
        zeroed contribution. A release is ε·distance-DP. So for any start from the server, it is pure p/ν-DP for
        zeroing the client's data and pure 2p/ν-DP for exchanging them. Per layer, array l of p_l parameters has
        ε_l = p_l/(ν·R) and its own ball: it costs p_l/ν (2·p_l/ν), the draws are independent, and the sum over the
        arrays is p/ν (2p/ν) again.
    """

    radius: float
    noise_multiplier: float
    per_layer: bool = False

    premises = (BUNDLE, CRYPTOGRAPHY)

    def __post_init__(self) -> None:
        check.positive(radius=self.radius)
        _check_multiplier(laplace_noise_multiplier=self.noise_multiplier)

    @property
    def ball(self) -> float:
        """Return R; 0 per layer."""
        return 0.0 if self.per_layer else self.radius

    def release(self, trained: Arrays, start: Arrays, noise: GaussianNoise, tell: Tell | None = None) -> Sent:
        """Return start + projection of (trained - start) + noise; see `LocalMechanism`.

        Args:
            trained, start, noise, tell: as in `LocalMechanism.release`.
        """

        def scale(size: int, norm: float) -> Scale:
            factor = factor_for(norm, self.radius)
            if not self.noise_multiplier:
                return Scale(factor)
            epsilon = self._rate(size)
            step = public_step(size, epsilon)
            return Scale(factor, deviation(noise, size, epsilon), step)

        return released(trained, start, noise, self.per_layer, scale, tell)

    def events(self, parameters: int) -> list[Event]:
        """Return one pure release of p/ν."""
        check.positive(parameters=parameters)
        if not self.noise_multiplier:
            return [Unaccounted(no_noise("laplace"))]
        public_step(parameters, self._rate(parameters))
        return [Pure(parameters / self.noise_multiplier)]

    def caveats(self) -> list[str]:
        """Return a caveat if there is no noise."""
        return [] if self.noise_multiplier else [no_noise("laplace")]

    def parameters(self) -> dict[str, float | bool]:
        """Return ν, the radius, and whether noise is drawn per array."""
        return _by_key(laplace_noise_multiplier=self.noise_multiplier, radius=self.radius, per_layer=self.per_layer)

    def _rate(self, size: int) -> float:
        """Return ε per unit of distance."""
        return size / self.noise_multiplier / self.radius


@dataclass(frozen=True)
class LocalGaussian(LocalMechanism):
    """Clip the update to C, truncate it to whole steps of a public grid, and add exact noise of deviation z·C.

    Args:
        clipping_norm: C > 0, in units of the weights.
        noise_multiplier: z, 0 or from `MIN_MULTIPLIER` to 1/`MIN_MULTIPLIER`.

    Guarantee: zeroing the client's contribution moves the integers by at most the steps of C, which is verified on the
        integers: a Gaussian mechanism of multiplier z. Exchanging it moves them by at most twice as much: multiplier
        z/2. Releases compose as Gaussians do, without amplification by sampling, since the server draws the cohort.
    """

    clipping_norm: float
    noise_multiplier: float

    premises = (BUNDLE, CRYPTOGRAPHY)

    def __post_init__(self) -> None:
        check.positive(gaussian_clipping_norm=self.clipping_norm)
        _check_multiplier(gaussian_noise_multiplier=self.noise_multiplier)
        Gaussian(self.noise_multiplier)

    @property
    def ball(self) -> float:
        """Return C."""
        return self.clipping_norm

    def release(self, trained: Arrays, start: Arrays, noise: GaussianNoise, tell: Tell | None = None) -> Sent:
        """Return start + clipped (trained - start) + noise; see `LocalMechanism`.

        Args:
            trained, start, noise, tell: as in `LocalMechanism.release`.
        """
        if self._std():
            grid = Grid.of(self.clipping_norm, self.noise_multiplier, 1)
            return released_whole(trained, start, noise, grid, tell)

        def scale(size: int, norm: float) -> Scale:
            return Scale(factor_for(norm, self.clipping_norm))

        return released(trained, start, noise, False, scale, tell)

    def events(self, parameters: int) -> list[Event]:
        """Return one Gaussian release of multiplier z, relative to zeroing the contribution."""
        check.positive(parameters=parameters)
        return [Gaussian(self.noise_multiplier)] if self._std() else [Unaccounted(no_noise("gaussian"))]

    def caveats(self) -> list[str]:
        """Return a caveat if there is no noise."""
        return [] if self.noise_multiplier else [no_noise("gaussian")]

    def parameters(self) -> dict[str, float | bool]:
        """Return z and C."""
        return _by_key(gaussian_noise_multiplier=self.noise_multiplier, gaussian_clipping_norm=self.clipping_norm)

    def _std(self) -> float:
        """Return z·C.

        Raises:
            PrivacyError: z·C is beyond the range of numbers.
        """
        if not self.noise_multiplier:
            return 0.0
        refuse_beyond(math.log(self.noise_multiplier) + math.log(self.clipping_norm))
        return self.noise_multiplier * self.clipping_norm


@dataclass(frozen=True)
class PublishedLaplace(LocalMechanism):
    """Laplace noise in proportion to the update itself, as published: its radius is how far training moved the model.

    A part that training has not moved gets no noise, and the client sends it back unchanged. The same holds for a part
    whose norm would need noise beyond the range of single precision.

    Args:
        noise_multiplier: ν; ε = p/(ν·‖Δ‖).
        per_layer: whether every array has a radius and a draw of its own.

    Guarantee: none. ε depends on private data, and the size of the noise reveals it.

    Source: Galli et al. (2023), Algorithm 1.
    """

    noise_multiplier: float
    per_layer: bool = False

    premises = (BUNDLE, CRYPTOGRAPHY)

    def __post_init__(self) -> None:
        _check_multiplier(laplace_noise_multiplier=self.noise_multiplier)

    def release(self, trained: Arrays, start: Arrays, noise: GaussianNoise, tell: Tell | None = None) -> Sent:
        """Return trained + noise; see `LocalMechanism`.

        Args:
            trained, start, noise, tell: as in `LocalMechanism.release`.
        """

        def scale(size: int, norm: float) -> Scale:
            if not self.noise_multiplier:
                return Scale(1.0)
            try:
                epsilon = size / self.noise_multiplier / norm if norm else math.inf
                step = public_step(size, epsilon)
            except (ConfigError, PrivacyError):
                return Scale(0.0)
            return Scale(1.0, deviation(noise, size, epsilon), step)

        return released(trained, start, noise, self.per_layer, scale, tell)

    def events(self, parameters: int) -> list[Event]:
        """Return one Laplace release, with the update's own norm as the unit of distance."""
        check.positive(parameters=parameters)
        if not self.noise_multiplier:
            return [Unaccounted(no_noise("laplace"))]
        return [Laplace(parameters / self.noise_multiplier, 1.0)]

    def caveats(self) -> list[str]:
        """Return the caveat that the scale of the noise is private."""
        own = (
            "privacy.radius is 0: the scale of the noise follows from how far a client's own data moved its model, and "
            "tells it; what is leaked within that distance is nominal"
        )
        return [own] if self.noise_multiplier else [no_noise("laplace"), own]

    def parameters(self) -> dict[str, float | bool]:
        """Return ν, a radius of 0, and whether noise is drawn per array."""
        return _by_key(laplace_noise_multiplier=self.noise_multiplier, radius=0.0, per_layer=self.per_layer)


def _by_key(**values: float | bool) -> dict[str, float | bool]:
    return {f"privacy.{name.replace('_', '-')}": value for name, value in values.items()}


def _check_multiplier(**multiplier: float) -> None:
    check.non_negative(**multiplier)
    for name, value in multiplier.items():
        if 0 < value < MIN_MULTIPLIER:
            raise ConfigError(f"{name} must be 0 or at least {MIN_MULTIPLIER:g}, got {value}")


def no_noise(mechanism: str) -> str:
    """Return the caveat of a client's mechanism without noise.

    Args:
        mechanism: its name in `privacy.client`.
    """
    return f"privacy.{mechanism}-noise-multiplier is 0: there is no noise"


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
        if fits(trained, start):
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
