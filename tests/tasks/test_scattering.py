"""Wavelet scattering: a contraction that hardly notices a shift, and that sees the direction of edges."""

import numpy as np

from cloister.tasks.scattering import ANGLES, CHANNELS, MARGIN, Filters

SIZES = ((28, 28), (8, 8), (30, 17))


def images(height, width, count=8, seed=0):
    return np.random.default_rng(seed).normal(size=(count, height, width)).astype(np.float32)


def stripes(angle, size=28):
    """A wave of the finest wavelets' frequency across the image."""
    y, x = np.mgrid[:size, :size]
    return np.cos(3 * np.pi / 4 * (np.cos(angle) * x + np.sin(angle) * y)).astype(np.float32)


def test_there_are_81_channels_at_every_fourth_pixel():
    for height, width in SIZES:
        assert Filters.of(height, width).scattered(images(height, width)[0]).shape == (
            81,
            -(-height // 4),
            -(-width // 4),
        )


def test_at_no_frequency_do_the_filters_add_energy():
    """The Littlewood-Paley sum for real signals, the premise of the contraction."""
    for height, width in ((size, size) for size in range(4, 64, 3)):
        filters = Filters.of(height, width)
        low = np.multiply.outer(*(np.fft.fft(each[0]) for each in (filters.rows, filters.columns)))
        energy = np.square(filters.fine).sum(axis=0) + np.square(4 * filters.coarse).sum(axis=0)
        opposite = np.roll(np.flip(energy), 1, axis=(0, 1))
        assert (np.square(np.abs(low)) + (energy + opposite) / 2).max() <= 1 + 1e-5, (height, width)


def test_averages_shrink_what_they_average():
    for height, width in SIZES:
        filters = Filters.of(height, width)
        for average in (filters.rows, filters.columns, filters.half_rows, filters.half_columns):
            assert np.linalg.norm(average, 2) < 1


def test_no_two_images_are_further_apart_than_their_pixels():
    for height, width in SIZES:
        filters = Filters.of(height, width)
        for one, other in zip(images(height, width), images(height, width, seed=1) * 100, strict=True):
            for near in (other, one + 1e-3 * other, np.zeros_like(one)):
                assert np.linalg.norm(filters.scattered(one) - filters.scattered(near)) <= np.linalg.norm(one - near)


def test_a_small_shift_moves_coefficients_far_less_than_pixels():
    filters = Filters.of(28, 28)
    for image in np.pad(images(16, 16), ((0, 0), (6, 6), (6, 6))):
        moved = np.roll(image, 1, axis=1)
        before, after = filters.scattered(image), filters.scattered(moved)
        share = np.linalg.norm(after - before) / np.linalg.norm(before)
        assert share < 0.3 * np.linalg.norm(moved - image) / np.linalg.norm(image)


def test_each_angle_has_a_channel_of_its_own():
    filters = Filters.of(28, 28)
    first = [filters.scattered(stripes(np.pi * angle / ANGLES))[1 : 1 + ANGLES, 3, 3] for angle in range(ANGLES)]
    assert np.argmax(first, axis=1).tolist() == list(range(ANGLES))


def test_a_wavelet_sees_no_constant():
    filters = Filters.of(28, 28)
    inside = filters.scattered(np.ones((28, 28), np.float32))[1 : 1 + ANGLES, 3, 3]
    assert np.abs(filters.fine[:, 0, 0]).max() < 1e-6 and np.abs(inside).max() < 0.02


def test_coefficients_equal_those_computed_by_convolution_in_space():
    """Of the first order, for the coarse wavelets, with sums over pixels in place of the FFT."""
    filters, image = Filters.of(8, 8), images(8, 8)[0].astype(np.float64)
    size = 8 + MARGIN
    kernel = np.fft.ifft2(4 * filters.coarse[3].astype(np.float64))
    padded = np.zeros((size, size))
    padded[:8, :8] = image
    seen = np.zeros((size, size), complex)
    for row, column in np.ndindex(8, 8):
        seen += padded[row, column] * np.roll(kernel, (row, column), axis=(0, 1))
    expected = filters.half_rows @ np.abs(seen)[::2, ::2] @ filters.half_columns.T
    found = filters.scattered(image.astype(np.float32))
    assert len(found) == CHANNELS
    np.testing.assert_allclose(found[1 + ANGLES + 3], expected, atol=1e-5)
