"""Wavelet scattering of images: fixed features of edges and their combinations, without any training data.

For an image x, J = 2 and L = 8 angles, with ψ_{j,l} a Morlet wavelet of scale 2^j at the angle πl/L, and A the average
with a Gaussian of scale 2^J at every fourth pixel, the channels are

    A x,    A |x * ψ_{j,l}|,    A ||x * ψ_{0,l}| * ψ_{1,m}|

1 + JL + L²J(J-1)/2 = 81 in all. A Morlet wavelet is ψ(u) = g(Ru)·(e^{iξu₁} - κ), where g is a Gaussian of deviation
0.8·2^j along the wave and 1/ζ of that across it, ξ = 3π/4·2^-j, ζ = 4/L, and κ makes its mean zero.

Guarantee: ‖S(x) - S(y)‖ ≤ ‖x - y‖ in L2, up to roundings. At every frequency, |φ|² + ½Σ(|ψ(ω)|² + |ψ(-ω)|²) ≤ 1, so
    that one layer is a contraction of real signals (Parseval); tests measure this sum. The modulus, the padding with
    zeros and the choice of a subset of pixels are contractions too, and so is A on every second pixel (`Filters.of`).

Sources: Bruna and Mallat (2013), arXiv:1203.1513, §2; Oyallon and Mallat (2015), arXiv:1412.8659, §2.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy.fft
from numpy.typing import NDArray

SCALES, ANGLES = 2, 8
STRIDE = 2**SCALES
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2
SPREAD, WAVE, SLANT = 0.8, 3 * np.pi / 4, 4 / ANGLES
MARGIN = 8
"""Zeros beside an image: the FFT is periodic, and an edge must not meet the opposite one."""
ALIASES = np.arange(-2, 3) * 2 * np.pi
"""Periods of the frequency that are summed: a filter is sampled at whole pixels."""

Complex = NDArray[np.complex64 | np.complex128]


@dataclass(frozen=True)
class Filters:
    """Filters for images of one size.

    Attributes:
        size: height and width with the margin, even.
        fine: spectra of the wavelets of scale 1, shape (L, *size), real.
        coarse: those of scale 2, divided by 4 for the choice of every second pixel.
        rows, columns: A along each axis, shapes (⌈height/4⌉, size[0]) and (⌈width/4⌉, size[1]).
        half_rows, half_columns: A for every second pixel.
    """

    size: tuple[int, int]
    fine: NDArray[np.float32]
    coarse: NDArray[np.float32]
    rows: NDArray[np.float32]
    columns: NDArray[np.float32]
    half_rows: NDArray[np.float32]
    half_columns: NDArray[np.float32]

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, height: int, width: int) -> "Filters":
        """Return the filters for images of `height` times `width` pixels.

        `half_rows` has twice the values of every second column of `rows`, so that a constant image keeps its average.
        Its rows sum to 1 and its columns to 0.6 at most, so its L2 norm, at most √(1·0.6), is below 1.
        """
        size = _padded(height), _padded(width)
        frequencies = [2 * np.pi * np.fft.fftfreq(length) for length in size]
        wavelets = np.array(
            [
                [_morlet(frequencies[0], frequencies[1], scale, angle) for angle in range(ANGLES)]
                for scale in range(SCALES)
            ]
        )
        fine, coarse = wavelets.astype(np.float32)
        averages = [_averages(own, padded) for own, padded in zip((height, width), size, strict=True)]
        halves = [2 * each[:, ::2] for each in averages]
        return cls(size, fine, coarse / 4, *averages, *halves)

    def scattered(self, image: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the coefficients of one grey image, shape (81, ⌈height/4⌉, ⌈width/4⌉).

        Args:
            image: shape (height, width).
        """
        padded = np.zeros(self.size, np.float32)
        padded[: image.shape[0], : image.shape[1]] = image
        spectrum = scipy.fft.fft2(padded)
        fine = np.abs(scipy.fft.ifft2(spectrum * self.fine))
        coarse = np.abs(scipy.fft.ifft2(_every_second(spectrum * self.coarse)))
        both = scipy.fft.fft2(fine)[:, None] * self.coarse
        both = np.abs(scipy.fft.ifft2(_every_second(both.reshape(-1, *self.size))))
        whole = np.concatenate([padded[None], fine])
        half = np.concatenate([coarse, both])
        return np.concatenate(
            [self.rows @ whole @ self.columns.T, self.half_rows @ half @ self.half_columns.T], dtype=np.float32
        )


def _padded(length: int) -> int:
    """Return an even length with the margin that the FFT is fast for."""
    length += MARGIN
    while length % 2 or scipy.fft.next_fast_len(length) > length:
        length += 1
    return length


def _morlet(rows: NDArray, columns: NDArray, scale: int, angle: int) -> NDArray:
    """Return the spectrum of ψ, shape (rows, columns): real, as ψ(-u) is the conjugate of ψ(u)."""
    turn, deviation, wave = np.pi * angle / ANGLES, SPREAD * 2**scale, WAVE / 2**scale
    y = (rows[:, None] + ALIASES)[:, None, :, None]
    x = (columns[:, None] + ALIASES)[None, :, None, :]
    along, across = np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x
    # The Fourier transform of g at frequencies, summed over their aliases.
    moved, centred = (
        np.exp(-np.square(deviation) / 2 * (np.square(along - by) + np.square(across / SLANT))).sum(axis=(2, 3))
        for by in (wave, 0.0)
    )
    return moved - moved[0, 0] / centred[0, 0] * centred


def _averages(length: int, padded: int) -> NDArray[np.float32]:
    """Return A along one axis: weights of all pixels, in rows for every fourth pixel of the image."""
    frequencies = 2 * np.pi * np.fft.fftfreq(padded)[:, None] + ALIASES
    spectrum = np.exp(-np.square(SPREAD * STRIDE / 2 * frequencies) / 2).sum(axis=1)  # of the sampled Gaussian
    kernel = np.fft.ifft(spectrum).real / spectrum[0]
    places = np.arange(padded)[None, :] - np.arange(0, length, STRIDE)[:, None]
    return kernel[places % padded].astype(np.float32)


def _every_second(spectra: Complex) -> Complex:
    """Return four times the spectra of every second pixel along both axes."""
    height, width = spectra.shape[1] // 2, spectra.shape[2] // 2
    folded = spectra[:, :height] + spectra[:, height:]
    return folded[:, :, :width] + folded[:, :, width:]
