"""Mechanisms that a client applies to its own update, with a guarantee that needs no trust in the server.

    Δ = trained - start  ─▶  bounded to a ball  ─▶  + noise, on a public grid  ─▶  + start  ─▶  the model's own dtype

The server chooses the start. The trained model depends on the data and on the server. The guarantee holds for every
pair of them, since noise is added to a point of a ball that is fixed beforehand. It rests on three points:

- Noise is added to the bounded update, on a public grid, and the start only afterwards. Around a start of 10³⁸,
  neighbouring floats are 10³¹ apart: added first, it would turn the smallest difference of two updates into one that
  no noise covers. Added last, it is post-processing, and so are the rounding to the model's dtype and its saturation.
- The norm is that of the true update, overstated by its rounding, for every number that a double holds. Gaussian noise
  is exact and added to integers whose norm is verified; Laplace noise is continuous.
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
from dataclasses import dataclass

from cloister.core import check
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.accounting.events import Event, Gaussian, Laplace, Pure, Unaccounted
from cloister.privacy.accounting.vocabulary import MIN_MULTIPLIER
from cloister.privacy.claims.premises import BUNDLE, CRYPTOGRAPHY, Contributor
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.laplace import deviation, public_step
from cloister.privacy.mechanisms.local_update import Arrays, Scale, Sent, Tell, factor_for, released, released_whole
from cloister.privacy.mechanisms.noise import GaussianNoise, refuse_beyond

NO_NOISE = "privacy.client-noise-multiplier is 0: there is no noise"


class LocalMechanism(Contributor, ABC, abstract=True):
    """What a client may do to its update, as a value."""

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
        _check_multiplier(self.noise_multiplier)

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
            return [Unaccounted(NO_NOISE)]
        public_step(parameters, self._rate(parameters))
        return [Pure(parameters / self.noise_multiplier)]

    def caveats(self) -> list[str]:
        """Return a caveat if there is no noise."""
        return [] if self.noise_multiplier else [NO_NOISE]

    def parameters(self) -> dict[str, float | bool]:
        """Return ν, the radius, and whether noise is drawn per array."""
        return _by_key(client_noise_multiplier=self.noise_multiplier, radius=self.radius, per_layer=self.per_layer)

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
        check.positive(client_clipping_norm=self.clipping_norm)
        _check_multiplier(self.noise_multiplier)
        Gaussian(self.noise_multiplier)

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
        return [Gaussian(self.noise_multiplier)] if self._std() else [Unaccounted(NO_NOISE)]

    def caveats(self) -> list[str]:
        """Return a caveat if there is no noise."""
        return [] if self.noise_multiplier else [NO_NOISE]

    def parameters(self) -> dict[str, float | bool]:
        """Return z and C."""
        return _by_key(client_noise_multiplier=self.noise_multiplier, client_clipping_norm=self.clipping_norm)

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
        _check_multiplier(self.noise_multiplier)

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
        return [Laplace(parameters / self.noise_multiplier, 1.0)] if self.noise_multiplier else [Unaccounted(NO_NOISE)]

    def caveats(self) -> list[str]:
        """Return the caveat that the scale of the noise is private."""
        own = (
            "privacy.radius is 0: the scale of the noise follows from how far a client's own data moved its model, and "
            "tells it; what is leaked within that distance is nominal"
        )
        return [own] if self.noise_multiplier else [NO_NOISE, own]

    def parameters(self) -> dict[str, float | bool]:
        """Return ν, a radius of 0, and whether noise is drawn per array."""
        return _by_key(client_noise_multiplier=self.noise_multiplier, radius=0.0, per_layer=self.per_layer)


def _by_key(**values: float | bool) -> dict[str, float | bool]:
    return {f"privacy.{name.replace('_', '-')}": value for name, value in values.items()}


def _check_multiplier(multiplier: float) -> None:
    check.non_negative(client_noise_multiplier=multiplier)
    if 0 < multiplier < MIN_MULTIPLIER:
        raise ConfigError(f"client_noise_multiplier must be 0 or at least {MIN_MULTIPLIER:g}, got {multiplier}")
