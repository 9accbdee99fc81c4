"""One encoded image as grey values."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".pgm")
MOST_PIXELS = 2**26
"""Of one image: more are damaged."""
LARGEST = 2**28
"""Bytes of one image, as it is stored."""
MOST_SCANS = 64
"""Of a JPEG: each changes all pixels, and a hundred bytes are enough for one. Programs write about ten."""
MOST_PARTS = 2**16
"""Of a PNG."""
PNG, PART = b"\x89PNG\r\n\x1a\n", 12
"""First bytes of a PNG, and those of each of its parts beside the content: length, kind and check."""
JPEG, SCAN, END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"
"""Markers: of the first bytes of a JPEG, of the beginning of its pixels, and of its end."""


def is_image(path: Path) -> bool:
    """Whether a file's name is that of an image; hidden files are none."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def grey(encoded: bytes, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """A grey image of this height and width, from 0 (black) to 1 (white); None where the bytes are damaged.

    Args:
        encoded: the bytes of a file.
        shape: height and width of the result. An image of another size is brought to it by area interpolation.
    """
    image = _decoded(encoded)
    # OpenCV leaves colours and other numbers in some kinds of files whatever it is asked for.
    if image is None or image.ndim != 2 or image.dtype != np.uint8:
        return None
    if image.shape != shape:
        import cv2

        image = cv2.resize(image, shape[::-1], interpolation=cv2.INTER_AREA)
    return image.astype(np.float32) / np.float32(255)


def _decoded(encoded: bytes) -> NDArray | None:
    # Read when OpenCV is loaded; see `_claims_too_much` for what it does not hold against it.
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MOST_PIXELS))
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # our error names damaged images
    if not 0 < len(encoded) <= LARGEST or _is_cut_off(encoded) or _is_endless(encoded) or _claims_too_much(encoded):
        return None
    try:
        return cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_GRAYSCALE)
    except cv2.error:
        return None


def _is_cut_off(encoded: bytes) -> bool:
    """Whether a JPEG was: some versions of OpenCV fill it up, and call it whole."""
    return encoded.startswith(JPEG) and encoded.rfind(END) < encoded.rfind(SCAN)


def _is_endless(encoded: bytes) -> bool:
    """Whether a JPEG has so many scans that it would take minutes."""
    return encoded.startswith(JPEG) and encoded.count(SCAN) > MOST_SCANS


def _claims_too_much(encoded: bytes) -> bool:
    """Whether a PNG says that it has more pixels or parts than are read, or a part longer than the rest of the file.

    OpenCV asks for the memory of pixels and parts before it looks at them: a hundred bytes would take four gigabytes.
    """
    if not encoded.startswith(PNG):
        return False
    width, height = (int.from_bytes(encoded[start : start + 4]) for start in (16, 20))
    start, kind, parts = len(PNG), b"", 0
    while start < len(encoded) and kind != b"IEND" and parts <= MOST_PARTS:
        length, kind = int.from_bytes(encoded[start : start + 4]), encoded[start + 4 : start + 8]
        start, parts = start + PART + length, parts + 1
    return width * height > MOST_PIXELS or parts > MOST_PARTS or start > len(encoded)
