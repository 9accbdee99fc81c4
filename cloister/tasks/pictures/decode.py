"""Decoding of one image into grey values."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.pictures.formats import MAX_PIXELS, MAX_SIDE, is_safe_to_decode

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".pgm")


def is_image(path: Path) -> bool:
    """Return whether a file name has an image suffix and is not hidden."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def grey(encoded: bytes, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """Decode an image to grey values from 0 (black) to 1 (white).

    Args:
        encoded: the bytes of a file.
        shape: height and width of the result. An image of another size is resized by area interpolation.

    Returns:
        Shape `shape`; None if the bytes are damaged.
    """
    # OpenCV reads these limits when it is loaded. `formats` checks what OpenCV does not.
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))
    for side in ("WIDTH", "HEIGHT"):
        os.environ.setdefault(f"OPENCV_IO_MAX_IMAGE_{side}", str(MAX_SIDE))
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # our error names damaged images
    if not is_safe_to_decode(encoded):
        return None
    try:
        image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_GRAYSCALE)
    except cv2.error:
        return None
    # For some formats OpenCV returns colours or another dtype in spite of the flag.
    if image is None or image.ndim != 2 or image.dtype != np.uint8:
        return None
    if image.shape != shape:
        image = cv2.resize(image, shape[::-1], interpolation=cv2.INTER_AREA)
    return image.astype(np.float32) / np.float32(255)
