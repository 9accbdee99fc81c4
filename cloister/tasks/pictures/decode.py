"""Decoding of one image into grey values, for an allowlist of formats with limits on the size that a file claims.

OpenCV detects many formats by their first bytes, independently of the file name. Some formats take minutes and
gigabytes for a hundred bytes. JPEG 2000 is one: a file may claim that each of its pixels is coded separately.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 2**28
"""Largest size of one encoded image, in bytes."""
MAX_PIXELS = 2**26
"""Largest number of pixels of one image."""
MAX_SIDE = 2**16
"""Largest height or width in pixels: a format may store every row separately."""
MAX_SCANS = 64
"""Largest number of scans of a JPEG. Encoders write about ten.
Each scan changes all pixels, and a hundred bytes suffice for one.
"""
MAX_CHUNKS = 2**16
"""Largest number of chunks of a PNG."""
PNG, CHUNK_OVERHEAD = b"\x89PNG\r\n\x1a\n", 12
"""First bytes of a PNG, and the overhead of each chunk in bytes: length, type and checksum."""
JPEG, SCAN, END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"
"""Markers of a JPEG: first bytes, start of scan, end of image."""
TIFF = (b"II*\0", b"MM\0*")
"""First bytes of a TIFF: little-endian and big-endian."""
ENTRY_BYTES, TAG_COMPRESSION, TYPE_SHORT = 12, 259, 3
"""Bytes of an entry of a TIFF directory, the tag of its compression, and the number of the type SHORT."""
COMPRESSIONS = (1, 5, 8, 32773, 32946)
"""None, LZW, deflate, PackBits, and deflate by its old number. Other numbers stand for separate formats."""
BMP_AND_PNM = (b"BM", b"P1", b"P2", b"P3", b"P4", b"P5", b"P6")
"""First bytes of BMP, and of PBM, PGM and PPM in text and binary form."""


def is_safe_to_decode(encoded: bytes) -> bool:
    """Return whether an image can be decoded in bounded time and memory.

    It must be a PNG, JPEG, TIFF, BMP, PBM, PGM or PPM within the limits of this module.

    Args:
        encoded: the bytes of a file.
    """
    if not 0 < len(encoded) <= MAX_BYTES:
        return False
    if encoded.startswith(PNG):
        return not _claims_too_much(encoded)
    if encoded.startswith(JPEG):
        # Some versions of OpenCV fill the missing pixels of a truncated JPEG without an error.
        return encoded.rfind(END) >= encoded.rfind(SCAN) and encoded.count(SCAN) <= MAX_SCANS
    if encoded.startswith(TIFF):
        return all(way in COMPRESSIONS for way in _compressions(encoded))
    return encoded.startswith(BMP_AND_PNM)


def _claims_too_much(encoded: bytes) -> bool:
    """Return whether a PNG claims more than this module or the file permits.

    It may claim too many pixels or chunks, or a chunk longer than the rest of the file. OpenCV allocates memory for
    pixels and chunks before it reads them: a hundred bytes would take four gigabytes.
    """
    width, height = (int.from_bytes(encoded[start : start + 4]) for start in (16, 20))
    start, chunk_type, chunks = len(PNG), b"", 0
    while start < len(encoded) and chunk_type != b"IEND" and chunks <= MAX_CHUNKS:
        length, chunk_type = int.from_bytes(encoded[start : start + 4]), encoded[start + 4 : start + 8]
        start, chunks = start + CHUNK_OVERHEAD + length, chunks + 1
    return width * height > MAX_PIXELS or chunks > MAX_CHUNKS or start > len(encoded)


def _compressions(encoded: bytes) -> Iterator[int]:
    """Yield the compression numbers of a TIFF.

    A malformed entry gives 0.
    """
    order: Literal["little", "big"] = "little" if encoded.startswith(TIFF[0]) else "big"
    first = int.from_bytes(encoded[4:8], order)
    fields = int.from_bytes(encoded[first : first + 2], order)
    for start in range(first + 2, first + 2 + fields * ENTRY_BYTES, ENTRY_BYTES):
        tag, field_type = (int.from_bytes(encoded[at : at + 2], order) for at in (start, start + 2))
        if tag == TAG_COMPRESSION:
            short = field_type == TYPE_SHORT and int.from_bytes(encoded[start + 4 : start + 8], order) == 1
            yield int.from_bytes(encoded[start + 8 : start + 10], order) if short else 0


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
    # OpenCV reads these limits when it is loaded. `is_safe_to_decode` checks what OpenCV does not.
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
