"""Decoding of one image to numbers from 0 to 1, for an allowlist of formats with limits on what a file claims.

OpenCV detects many formats by their first bytes, independently of the file name. Some formats take minutes and
gigabytes for a hundred bytes. JPEG 2000 is one: a file may claim that each of its pixels is coded separately.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.pictures.form import BYTE_BITS, MAX_BITS, Form, Note, Unreadable, unreadable
from cloister.tasks.pictures.medical import MAGIC, PREAMBLE, is_dicom, is_nifti, read_dicom, read_nifti

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
ENTRY_BYTES, MAX_ENTRIES = 12, 2**16
"""Bytes of an entry of a TIFF directory, and the largest number of entries of a file."""
TAG_BITS, TAG_COMPRESSION, TAG_PHOTOMETRIC, TAG_EXTRA, TYPE_SHORT = 258, 259, 262, 338, 3
"""Tags of a TIFF: bits of a sample, compression, meaning of a sample, samples beside the colours; the type SHORT."""
COMPRESSIONS = (1, 5, 8, 32773, 32946)
"""None, LZW, deflate, PackBits, and deflate by its old number. Other numbers stand for separate formats."""
BMP_AND_PNM = (b"BM", b"P1", b"P2", b"P3", b"P4", b"P5", b"P6")
"""First bytes of BMP, and of PBM, PGM and PPM in text and binary form."""
LARGEST = re.compile(rb"P[2356]" + 2 * rb"(?:\s|#[^\n]*\n)+\d{1,9}" + rb"(?:\s|#[^\n]*\n)+(\d{1,5})")
"""Header of a PGM or PPM: width, height, and the sample that is white."""


def is_safe_to_decode(encoded: bytes) -> bool:
    """Return whether an image can be decoded in bounded time and memory.

    It must be a PNG, JPEG, TIFF, BMP, PBM, PGM or PPM within the limits of this module.

    Args:
        encoded: the bytes of a file.
    """
    if not 0 < len(encoded) <= MAX_BYTES:
        return False
    if encoded.startswith(PNG):
        # It may claim too many pixels or chunks, or a chunk longer than the rest of the file. OpenCV allocates memory
        # for both before it reads them: a hundred bytes would take four gigabytes.
        width, height = (int.from_bytes(encoded[start : start + 4]) for start in (16, 20))
        ends = [len(PNG), *(end for _, end in _chunks(encoded))]
        return width * height <= MAX_PIXELS and len(ends) <= MAX_CHUNKS + 1 and ends[-1] <= len(encoded)
    if encoded.startswith(JPEG):
        # Some versions of OpenCV fill the missing pixels of a truncated JPEG without an error.
        return encoded.rfind(END) >= encoded.rfind(SCAN) and encoded.count(SCAN) <= MAX_SCANS
    if encoded.startswith(TIFF):
        entries = (entry for page in _pages_of(encoded) for entry in page if entry.tag == TAG_COMPRESSION)
        return all(entry[1:3] == (TYPE_SHORT, 1) and entry.value in COMPRESSIONS for entry in entries)
    return encoded.startswith(BMP_AND_PNM)


def _chunks(encoded: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the type and the end of each chunk of a PNG, one chunk beyond `MAX_CHUNKS` at most."""
    start, chunk_type, chunks = len(PNG), b"", 0
    while start < len(encoded) and chunk_type != b"IEND" and chunks <= MAX_CHUNKS:
        length, chunk_type = int.from_bytes(encoded[start : start + 4]), encoded[start + 4 : start + 8]
        start, chunks = start + CHUNK_OVERHEAD + length, chunks + 1
        yield chunk_type, start


class Entry(NamedTuple):
    """One entry of a directory of a TIFF: its tag, its type, the number of its values, and the first as a SHORT."""

    tag: int
    field_type: int
    number: int
    value: int


def _pages_of(encoded: bytes) -> list[list[Entry]]:
    """Return the entries of each page of a TIFF.

    Directories may refer to each other in a circle: the number of entries is limited.
    """
    order: Literal["little", "big"] = "little" if encoded.startswith(TIFF[0]) else "big"

    def number(start: int, size: int) -> int:
        return int.from_bytes(encoded[start : start + size], order)

    pages, start, left = list[list[Entry]](), number(4, 4), MAX_ENTRIES
    while start and left > 0:
        fields, page = min(number(start, 2), left), list[Entry]()
        for at in range(start + 2, start + 2 + fields * ENTRY_BYTES, ENTRY_BYTES):
            tag, field_type, count = number(at, 2), number(at + 2, 2), number(at + 4, 4)
            # More than two values stand elsewhere.
            page.append(Entry(tag, field_type, count, number(at + 8 if count <= 2 else number(at + 8, 4), 2)))
        pages.append(page)
        start, left = number(start + 2 + fields * ENTRY_BYTES, 4), left - fields - 1
    return pages


SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".pgm", ".dcm", ".dicom", ".ima", ".nii", ".nii.gz")
DIRECTORY = "DICOMDIR"
"""Name of the list of the files on a medium, which is in the format of DICOM."""


def is_image(path: Path) -> bool:
    """Return whether a visible file has the suffix of an image, or the first bytes of DICOM under any other name."""
    if path.name.startswith(".") or path.name.upper() == DIRECTORY:
        return False
    return path.name.lower().endswith(SUFFIXES) or is_dicom(content_of(path, PREAMBLE + len(MAGIC)))


def content_of(path: Path, count: int = -1) -> bytes:
    """Return the bytes of a file, or its first `count` bytes.

    They are empty if the file is unreadable, too large, or not regular (a pipe would block).
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            fits = stat.S_ISREG(found.st_mode) and (count >= 0 or found.st_size <= MAX_BYTES)
            return file.read(count) if fits else b""
    except OSError:
        return b""


def decode(encoded: bytes, form: Form) -> tuple[NDArray[np.float32], Note]:
    """Return an image as an example of shape `form.example`, from 0 (black) to 1 (white), and what was found.

    Args:
        encoded: the bytes of a file.
        form: constants of the task. Nothing but these and the file decides the result.

    Raises:
        Unreadable: the image is damaged, or the task does not say how to use it. No content raises another exception:
            it would take the other images of a client with it.
    """
    _opencv()  # raises if it is not installed, which is no fault of an image
    try:
        return _decoded(encoded, form)
    except Exception as error:  # the libraries raise many types
        raise unreadable(error, "is damaged") from None


def _decoded(encoded: bytes, form: Form) -> tuple[NDArray[np.float32], Note]:
    if is_dicom(encoded):
        planes, note = read_dicom(encoded, form, MAX_PIXELS, is_safe_to_decode)
    elif is_nifti(encoded):
        planes, note = read_nifti(encoded, form, MAX_BYTES, MAX_PIXELS)
    else:
        planes, note = _read_raster(encoded, form)
    example = np.stack([_fitted(plane, form) for plane in planes]).reshape(form.example)
    if not np.isfinite(example).all():
        raise Unreadable("holds numbers that are not finite")
    return example, note


def _fitted(plane: NDArray[np.float32], form: Form) -> NDArray[np.float32]:
    """Return grey values of shape (h, w), or colours of shape (h, w, 3), in the size and channels of the form."""
    if 0 in plane.shape or plane.shape[2:] not in ((), (3,)):
        raise Unreadable("has no pixels, or other samples than grey or red, green and blue")
    cv2 = _opencv()
    if plane.ndim == 3 and form.channels == 1:
        plane = cv2.cvtColor(plane, cv2.COLOR_RGB2GRAY)
    if plane.shape[:2] != form.shape:
        plane = cv2.resize(plane, form.shape[::-1], interpolation=cv2.INTER_AREA)
    if plane.ndim == 2 and form.channels > 1:
        plane = np.repeat(plane[..., None], form.channels, axis=2)
    return np.clip(plane, 0, 1)


def _opencv() -> ModuleType:
    # OpenCV reads these limits when it is loaded. `is_safe_to_decode` checks what OpenCV does not.
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))
    for side in ("WIDTH", "HEIGHT"):
        os.environ.setdefault(f"OPENCV_IO_MAX_IMAGE_{side}", str(MAX_SIDE))
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # our error names damaged images
    return cv2


def _read_raster(encoded: bytes, form: Form) -> tuple[list[NDArray[np.float32]], Note]:
    """Return the pages of a PNG, JPEG, TIFF, BMP, PBM, PGM or PPM that an example takes, and what was found."""
    cv2 = _opencv()
    if not encoded:
        raise Unreadable(f"is absent, unreadable or empty, or has more than {MAX_BYTES >> 20} MiB")
    pages = _pages_of(encoded) if encoded.startswith(TIFF) else [[]]
    _refuse_kinds(encoded, pages)
    kinds = (("PNG", PNG), ("JPEG", JPEG), ("TIFF", TIFF), ("BMP", b"BM"))
    kind = next((name for name, first in kinds if encoded.startswith(first)), "PNM")
    # A JPEG's own orientation is followed, and its samples have eight bits. Other files may have more, and alpha.
    flags = cv2.IMREAD_ANYCOLOR if kind == "JPEG" else cv2.IMREAD_UNCHANGED
    buffer, planes, scale = np.frombuffer(encoded, np.uint8), list[NDArray[np.float32]](), ""
    for number in form.chosen(len(pages)):
        try:
            if len(pages) == 1:
                image = cv2.imdecode(buffer, flags)
            else:
                image = (*cv2.imdecodemulti(buffer, flags, range=(number, number + 1))[1], None)[0]
        except cv2.error as error:
            raise unreadable(error, "is damaged") from None
        if image is None:
            raise Unreadable("is damaged")
        if image.dtype not in (np.uint8, np.uint16) or image.ndim not in (2, 3):
            raise Unreadable("has samples that are no whole numbers of 8 or 16 bits without sign: save it as such")
        if image.ndim == 3 and image.shape[2] == 4 and image[..., 3].min() < np.iinfo(image.dtype).max:
            raise Unreadable("has transparent pixels (alpha): save it without transparency")
        colour = image if image.ndim == 2 else image[..., 2::-1]  # OpenCV has blue, green, red, and perhaps alpha
        white, scale = _white(encoded, image.dtype.itemsize * 8, form)
        if colour.max() > white:
            raise Unreadable(f"has samples above {white}, the largest of {scale}: state more bits in the task")
        if colour.dtype == np.uint16 and any(entry[::3] == (TAG_PHOTOMETRIC, 0) for entry in pages[number]):
            colour = white - colour  # white is zero: OpenCV inverts eight bits alone
        planes.append(colour.astype(np.float32) / np.float32(white))
    return planes, Note(kind, scale, 1 if colour.ndim == 2 else 3, len(pages), *image.shape[:2])


def _refuse_kinds(encoded: bytes, pages: list[list[Entry]]) -> None:
    """Refuse files that OpenCV reads slowly, reads wrongly, or does not read as they are meant.

    Raises:
        Unreadable: with the remedy.
    """
    if not is_safe_to_decode(encoded):
        if encoded.startswith(TIFF) and pages:
            raise Unreadable("is a TIFF of a compression that is not read: save it uncompressed, or with LZW")
        raise Unreadable("is damaged, too large, or of another kind than PNG, JPEG, TIFF, BMP, PGM, DICOM and NIfTI")
    if encoded.startswith(PNG):
        chunks = {chunk for chunk, _ in _chunks(encoded)}
        if b"acTL" in chunks:
            raise Unreadable("is an animated PNG: save the picture that is meant by itself")
        # OpenCV drops the one colour that stands for transparent, except that of a palette.
        if b"tRNS" in chunks and b"PLTE" not in chunks:
            raise Unreadable("has a transparent colour: save it without transparency")
    for entry in (entry for page in pages for entry in page):
        if entry.tag == TAG_EXTRA and entry.value:
            raise Unreadable("is a TIFF with transparency (alpha): save it without")
        if entry.tag == TAG_BITS and entry.value not in (1, BYTE_BITS, MAX_BITS):
            raise Unreadable(f"is a TIFF of {entry.value} bits a sample: save it with 8 or 16")


def _white(encoded: bytes, bits: int, form: Form) -> tuple[int, str]:
    """Return the sample that is white, and its source: the file's own statement, or else the task's.

    Raises:
        Unreadable: neither states it.
    """
    if header := LARGEST.match(encoded):
        white = max(1, int(header[1]))
        return white, f"{white.bit_length()} bits" if white & (white + 1) == 0 else f"values up to {white}"
    if bits == BYTE_BITS:
        return 2**BYTE_BITS - 1, f"{BYTE_BITS} bits"
    if form.bits is None:
        raise Unreadable(
            f"has {bits} bits a sample, and does not say how many are used: state it in the task, such as bits = 12 "
            "for values up to 4095"
        )
    return 2**form.bits - 1, f"{form.bits} bits"
