"""Form of a task's images: constants of the task, equal at every site, and no statistics of the data."""

from dataclasses import dataclass
from typing import NamedTuple

from cloister.utils.errors import ConfigError

COLOURS = {1: "grey", 3: "colour"}
"""Number of channels -> its name in messages."""
BYTE_BITS, MAX_BITS = 8, 16
"""Bits of a sample that needs no statement, and the largest number of bits of a sample."""


class Unreadable(Exception):
    """An image cannot be used. The text has the reason and the remedy, and neither the image's name nor its values."""


class LacksMemory(Unreadable):
    """An image cannot be decoded for want of memory. A later try may succeed."""


OPENCV_NO_MEMORY = -4
"""`code` of OpenCV's error for want of memory."""


def unreadable(error: Exception, reason: str) -> Unreadable:
    """Return the exception for an image that a library did not decode.

    Args:
        error: of the library, or already an `Unreadable`.
        reason: unless memory was short.
    """
    if isinstance(error, Unreadable):
        return error
    if isinstance(error, MemoryError) or getattr(error, "code", None) == OPENCV_NO_MEMORY:
        return LacksMemory("needs more memory to be decoded than there was")
    return Unreadable(reason)


@dataclass(frozen=True)
class Form:
    """Shape and scale of decoded images.

    Attributes:
        shape: height and width in pixels.
        channels: 1 for grey, 3 for red, green and blue.
        bits: number of used bits of a sample of more than eight: 2**bits - 1 becomes 1. None: not stated.
        window: the values that become 0 and 1, in the units of DICOM and NIfTI files. None: that of each file.
        slices: number of pages, frames or slices that an example has, evenly spaced. None: images have one page.

    Raises:
        ConfigError: a value is not valid.
    """

    shape: tuple[int, int]
    channels: int = 1
    bits: int | None = None
    window: tuple[float, float] | None = None
    slices: int | None = None

    def __post_init__(self) -> None:
        for name, is_valid, valid in (
            ("channels", self.channels in COLOURS, "1 (grey) or 3 (colour)"),
            ("bits", self.bits is None or 1 <= self.bits <= MAX_BITS, f"None, or 1 to {MAX_BITS}"),
            ("window", self.window is None or self.window[0] < self.window[1], "None, or (low, high) with low < high"),
            ("slices", self.slices is None or self.slices >= 1, "None, or a whole number above 0"),
        ):
            if not is_valid:
                raise ConfigError(f"{name} = {getattr(self, name)!r} of the task is not valid: it must be {valid}")

    @property
    def example(self) -> tuple[int, ...]:
        """Return the shape of an example: (height, width, channels), with several slices (slices, height, ...)."""
        return (*([self.slices] if self.slices and self.slices > 1 else []), *self.shape, self.channels)

    def chosen(self, pages: int) -> list[int]:
        """Return the numbers of the pages that an example takes, from 0. One slice is the middle page.

        Args:
            pages: of the image, above 0.

        Raises:
            Unreadable: the image has several pages and the task does not choose, or it has too few.
        """
        if self.slices is None and pages > 1:
            raise Unreadable(
                f"has {pages} pages or slices: slices = 1 in the task takes the middle one, slices = 8 takes eight"
            )
        count = self.slices or 1
        if pages < count:
            raise Unreadable(f"has {pages} pages or slices, fewer than slices = {count} of the task")
        return [(2 * place + 1) * pages // (2 * count) for place in range(count)]


class Note(NamedTuple):
    """Description of one file.

    Attributes:
        kind: name of the format.
        scale: source of the values that became 0 and 1, in words.
        channels, pages, height, width: of the file.
        reason: why the image cannot be used; empty if it can.
    """

    kind: str = ""
    scale: str = ""
    channels: int = 0
    pages: int = 0
    height: int = 0
    width: int = 0
    reason: str = ""
