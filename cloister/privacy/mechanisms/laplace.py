"""Laplace noise under the Euclidean norm in p dimensions, the mechanism of d-privacy.

Its density at x is K·exp(-ε‖x‖₂). By the triangle inequality, the likelihoods of a release from two points x and x′
differ by a factor of at most exp(ε‖x - x′‖): ε is a rate per unit of distance, not a budget
(Chatzikokolakis et al., 2013; Galli et al., 2023, Lemma 4.1). Independent Laplace noise on every coordinate is another
mechanism, for the L1 distance.

The usual sampler draws a radius from Gamma(p, 1/ε) and a direction as a normal vector over its norm, and needs two
passes. The same density is a scale mixture of normals, which needs no norm. By the Laplace transform of
Lévy's law, exp(-ε√s) is the mean of exp(-λs) over λ with density ∝ λ^(-3/2)·exp(-ε²/4λ). At s = ‖x‖² and λ = 1/2w each
exp(-λs) is (2πw)^(p/2) times the density of N(0, w·I) at x, so w has a density ∝ w^((p-1)/2)·exp(-ε²w/2). Hence

    x = √w · g,   g ~ N(0, I),   w·ε² ~ χ²(p + 1),

exactly, for every p ≥ 1 (Andrews and Mallows, 1974, for p = 1; Gómez-Sánchez-Manzano et al., 2008, for all p).

| edge case | result |
|---|---|
| a model of zeros | noise as on any other: its law does not depend on the model |
| one parameter | the usual Laplace distribution |
| a model without parameters | refused |
| NaN or infinite numbers, integers, a read-only array | refused before noise is added |
| ε of 0, below 0, NaN or infinite | refused |
| ε so small or large that noise exceeds the range of single precision | refused; the message omits ε |
"""

import math

import numpy as np

from cloister.privacy.mechanisms.noise import GaussianNoise, grid_step, refuse_beyond
from cloister.utils import check
from cloister.utils.arrays import Row
from cloister.utils.errors import ConfigError, PrivacyError


class LaplaceNoise:
    """Endless independent draws from the density K·exp(-ε‖x‖₂), from the cryptographic stream of `GaussianNoise`.

    Args:
        seed: None draws the key from the operating system. A number gives the same noise every time, for tests and
            for papers; a release with it is not private, and `seeded` is True.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._normals = GaussianNoise(seed)
        self.seeded = self._normals.seeded

    def add(self, model: Row, epsilon: float, step: float | None = None) -> None:
        """Add one draw in R^p to the p parameters of a model, in place.

        The sums are rounded to a public grid, since the low bits of floating-point noise reveal the number under it
        (Mironov, 2012). The step is a power of two, about 2^-20 of the noise's deviation. It is computed from ε and p,
        not from the draw of w.

        Args:
            model: flat, writable float32 or float64 arrays with p ≥ 1 numbers together, which share one draw. For
                independent draws, call this method once for each array.
            epsilon: ε > 0, per unit of Euclidean distance.
            step: of the grid, a power of two chosen beforehand; None: from ε and p. If ε depends on private numbers,
                a grid chosen from it reveals ε to a factor of two; one chosen beforehand reveals nothing.

        Guarantee: ε-d-privacy under the Euclidean distance for an ε that does not depend on the numbers: one release
            from x is at most exp(ε‖x - x′‖) times as likely as from x′.

        Raises:
            ConfigError: ε is not a finite number above 0, or the step is no power of two.
            PrivacyError: the arrays cannot hold this noise, or this is a copy in a forked process. Nothing is added.
        """
        for piece in model:
            if piece.dtype not in (np.float32, np.float64) or piece.ndim != 1 or not piece.flags.writeable:
                raise PrivacyError(
                    "Laplace noise is added in place to flat, writable float32 or float64 arrays; found "
                    f"{piece.dtype} of shape {piece.shape}"
                )
            if piece.size and not (math.isfinite(piece.min()) and math.isfinite(piece.max())):
                raise PrivacyError("Laplace noise hides nothing in an array with NaN or infinite numbers")
        size = sum(piece.size for piece in model)
        if not size:
            raise PrivacyError("Laplace noise needs a model of at least one parameter")
        public = public_step(size, epsilon)
        if step is None:
            step = public
        elif not np.finfo(np.float32).tiny <= step <= 2.0**100 or math.frexp(step)[0] != 0.5:
            raise ConfigError(f"the step of a grid must be a power of two from 2^-126 to 2^100, got {step}")
        self._normals.add_on_grid(model, deviation(self._normals, size, epsilon), step)


def deviation(normals: GaussianNoise, p: int, epsilon: float) -> float:
    """Draw √w, the deviation of the normals in one draw of Laplace noise in R^p.

    Args:
        normals: source of the draw; the p normals themselves must be other numbers of the same stream.
        p: parameters that share the draw, at least 1.
        epsilon: ε > 0, per unit of Euclidean distance.

    Returns:
        √(χ²(p + 1))/ε, which is private: it reveals the length of the noise.
    """
    return math.sqrt(_chi_square(normals, p + 1)) / epsilon


def public_step(p: int, epsilon: float) -> float:
    """Return the step of the grid for noise with this ε and p, independent of the draw.

    Args:
        p: parameters that share one draw, at least 1.
        epsilon: ε > 0, per unit of Euclidean distance.

    Raises:
        ConfigError: p or ε is not above 0.
        PrivacyError: the noise would exceed the range of numbers. The message omits the value, since ε may depend on
            a private update.
    """
    log_std = log_coordinate_variance(p, epsilon) / 2
    refuse_beyond(log_std)
    return grid_step(math.exp(log_std))


def _chi_square(normals: GaussianNoise, freedom: int) -> float:
    """Draw one χ² number with at least 2 degrees of freedom, in double precision.

    It is twice a Gamma of shape a = freedom/2, by rejection (Marsaglia, Tsang, 2000). Half the sum of two squared
    normals replaces the exponential number -ln u of that algorithm.
    """
    d = freedom / 2 - 1 / 3
    while True:
        x, *pair = normals.standard_normal(3, np.float64)
        root = 1 + x / math.sqrt(9 * d)
        if root > 0 and math.hypot(*pair) ** 2 / 2 > d * (root**3 - 1 - 3 * math.log(root)) - x**2 / 2:
            return float(2 * d * root**3)


def log_coordinate_variance(p: int, epsilon: float) -> float:
    """Return ln((p + 1)/ε²), the log variance of one coordinate.

    Source: Galli et al. (2023), Lemma 4.3.

    Args:
        p: parameters that share one draw, at least 1.
        epsilon: ε > 0, per unit of Euclidean distance.
    """
    check.positive(p=p, epsilon=epsilon)
    return math.log(p + 1) - 2 * math.log(epsilon)
