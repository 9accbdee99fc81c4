"""One encoded image as grey values."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".pgm")
MOST_PIXELS = 2**26
"""Of one image: more are damaged."""
PNG, SIZES = b"\x89PNG", slice(16, 24)
"""First bytes of a PNG, and where its width and height stand."""
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
    # Read when OpenCV is loaded; see `_is_too_large` for what it does not hold against it.
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MOST_PIXELS))
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # our error names damaged images
    # Some versions of OpenCV fill up a JPEG that was cut off, and call it whole.
    if not encoded or (encoded.startswith(JPEG) and encoded.rfind(END) < encoded.rfind(SCAN)) or _is_too_large(encoded):
        return None
    try:
        return cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_GRAYSCALE)
    except cv2.error:
        return None


def _is_too_large(encoded: bytes) -> bool:
    """Whether a PNG says that it has more pixels than are read: a hundred bytes may say so of a billion.

    OpenCV asks for the memory of all of them before it looks at its own limit.
    """
    width, height = (int.from_bytes(encoded[SIZES][part]) for part in (slice(4), slice(4, 8)))
    return encoded.startswith(PNG) and width * height > MOST_PIXELS
