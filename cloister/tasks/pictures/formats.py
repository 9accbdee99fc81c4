"""Which encoded images are decoded: those of a few formats that claim no more than they hold.

OpenCV knows many formats of images by their first bytes, whatever a file is called. Some of them take minutes and
gigabytes for a hundred bytes, as JPEG 2000 does, which may say that each of its pixels is coded by itself.
"""

from collections.abc import Iterator
from typing import Literal

MAX_BYTES = 2**28
"""Bytes of one image, as it is stored."""
MAX_PIXELS = 2**26
"""Of one image."""
MAX_SIDE = 2**16
"""Pixels of a side: a format may keep every row by itself."""
MAX_SCANS = 64
"""Of a JPEG: each changes all pixels, and a hundred bytes are enough for one. Programs write about ten."""
MAX_CHUNKS = 2**16
"""Of a PNG."""
PNG, CHUNK_OVERHEAD = b"\x89PNG\r\n\x1a\n", 12
"""First bytes of a PNG, and those of each of its chunks beside the content: length, type and check."""
JPEG, SCAN, END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"
"""Markers: of the first bytes of a JPEG, of the beginning of its pixels, and of its end."""
TIFF = (b"II*\0", b"MM\0*")
"""First bytes of a TIFF, the low byte of a number first, and the high one."""
ENTRY_BYTES, TAG_COMPRESSION, TYPE_SHORT = 12, 259, 3
"""Bytes of an entry of a TIFF; the tag of the one that says how pixels are compressed; the number of its type."""
COMPRESSIONS = (1, 5, 8, 32773, 32946)
"""None, LZW, deflate, PackBits, and deflate by its old number. Others are formats of their own."""
BMP_AND_PNM = (b"BM", b"P1", b"P2", b"P3", b"P4", b"P5", b"P6")
"""First bytes of BMP, and of PBM, PGM and PPM, as text and as numbers."""


def is_safe_to_decode(encoded: bytes) -> bool:
    """Whether these bytes are a PNG, JPEG, TIFF, BMP, PBM, PGM or PPM that can be decoded in bounded time and memory.

    Args:
        encoded: the bytes of a file.
    """
    if not 0 < len(encoded) <= MAX_BYTES:
        return False
    if encoded.startswith(PNG):
        return not _claims_too_much(encoded)
    if encoded.startswith(JPEG):
        return not _is_cut_off(encoded) and encoded.count(SCAN) <= MAX_SCANS
    if encoded.startswith(TIFF):
        return all(way in COMPRESSIONS for way in _compressions(encoded))
    return encoded.startswith(BMP_AND_PNM)


def _is_cut_off(encoded: bytes) -> bool:
    """Whether a JPEG was: some versions of OpenCV fill it up, and call it whole."""
    return encoded.rfind(END) < encoded.rfind(SCAN)


def _claims_too_much(encoded: bytes) -> bool:
    """Whether a PNG says that it has more pixels or chunks than are read, or a chunk longer than the rest of the file.

    OpenCV asks for the memory of pixels and chunks before it looks at them: a hundred bytes would take four gigabytes.
    """
    width, height = (int.from_bytes(encoded[start : start + 4]) for start in (16, 20))
    start, chunk_type, chunks = len(PNG), b"", 0
    while start < len(encoded) and chunk_type != b"IEND" and chunks <= MAX_CHUNKS:
        length, chunk_type = int.from_bytes(encoded[start : start + 4]), encoded[start + 4 : start + 8]
        start, chunks = start + CHUNK_OVERHEAD + length, chunks + 1
    return width * height > MAX_PIXELS or chunks > MAX_CHUNKS or start > len(encoded)


def _compressions(encoded: bytes) -> Iterator[int]:
    """How a TIFF says that its pixels are stored; 0 where it says so in an odd way, nothing where it does not."""
    order: Literal["little", "big"] = "little" if encoded.startswith(TIFF[0]) else "big"
    first = int.from_bytes(encoded[4:8], order)
    fields = int.from_bytes(encoded[first : first + 2], order)
    for start in range(first + 2, first + 2 + fields * ENTRY_BYTES, ENTRY_BYTES):
        tag, field_type = (int.from_bytes(encoded[at : at + 2], order) for at in (start, start + 2))
        if tag == TAG_COMPRESSION:
            short = field_type == TYPE_SHORT and int.from_bytes(encoded[start + 4 : start + 8], order) == 1
            yield int.from_bytes(encoded[start + 8 : start + 10], order) if short else 0
