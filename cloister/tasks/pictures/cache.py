"""Cache of decoded images, in files that are mapped into memory.

The name of a file is a digest of its sources, the form of the images and the order. A changed, new or removed source
file gives another name. Behind the pixels a file has what was found in each image. A file is not kept if memory was
short for an image. The cache may be deleted at any time.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from cloister.tasks.pictures.decode import decode
from cloister.tasks.pictures.form import Form, LacksMemory, Note, Unreadable
from cloister.tasks.pictures.sources import Source
from cloister.utils.errors import DataError
from cloister.utils.files import atomic_path, expanded

VERSION = 5
"""Version of the decoding. Another version uses other cache files."""
FOLDER = ".cloister-cache"
CACHE = "CLOISTER_CACHE"
"""Environment variable that names another folder for all caches."""
KEPT = 4
"""Largest number of files in one cache folder: a server that chooses image sizes must not fill a node's disk."""
logger = logging.getLogger("cloister.tasks")
EXTRAS = ("pydicom", "nibabel")
"""Packages without which files of some formats are unusable: a cache made without them is not used with them."""
_writing = threading.Lock()


class Decoded(NamedTuple):
    """Pixels of n images in the order of the call, and what was found in each file.

    Attributes:
        pixels: shape (n, *form.example), from 0 to 1, mapped into memory and read-only. An unusable image is NaN.
        notes: one of each image; that of an unusable image has the reason.
    """

    pixels: NDArray[np.float32]
    notes: tuple[Note, ...]


def decoded(source: Source, form: Form, order: Sequence[int] | NDArray[np.intp]) -> Decoded:
    """Return the pixels of images from a cache on disk.

    The first call makes the cache. It is beside the images, or below the user's cache folder if the first is not
    writable. If the environment variable `CLOISTER_CACHE` names a folder, the cache is only there.

    Args:
        source: of n images.
        form: of the decoded images.
        order: of the rows: row i is image `order[i]`. All n of them.

    Raises:
        DataError: neither place is writable, or a file of many images cannot be read.
    """
    files = [(path.relative_to(source.root).as_posix(), *_state(path)) for path in source.files]
    readers = [find_spec(name) is not None for name in EXTRAS]
    key = hashlib.sha256(repr((VERSION, form, readers, list(map(int, order)), files)).encode()).hexdigest()[:32]
    ranks, name = np.argsort(np.asarray(order, np.intp)), f"{key}.npy"
    shape = (len(ranks), *form.example)
    for place in places_of(source.root):
        found = _opened(place / name, shape)
        if found is not None:
            return found
    reasons = []
    for place in places_of(source.root):
        try:
            # Images may be confidential: only this user may read the cache.
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _writing, atomic_path(place / name) as partial:
                lacking = _write(source, form, ranks, partial)
                made = _opened(partial, shape)  # before another process can remove it
            if lacking:  # what is mapped stays readable
                (place / name).unlink(missing_ok=True)
                logger.warning("%d images are left out for want of memory: the next start tries them again", lacking)
            else:
                forget_the_oldest(place)
                kept = "decoded images are kept in %s, and may be deleted; %s names another folder"
                logger.warning(kept, place, CACHE)
        except OSError as error:
            reasons.append(f"{place} ({error.strerror})")
            continue
        if made is not None:
            return made
        reasons.append(f"{place} (what was written cannot be read)")
    raise DataError(f"decoded images can be kept in none of {', '.join(reasons)}; set {CACHE} to another folder")


def _state(path: Path) -> tuple[int, ...]:
    """Return the size, inode and times of a file.

    It is empty for a missing file, whose image is unusable. Name, size and modification time alone may equal
    those of another site's file, whose cache is in the same place.
    """
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)


def places_of(root: Path) -> tuple[Path, ...]:
    """Return the candidate cache folders of the data in a folder, the preferred one first."""
    below = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    if chosen := os.environ.get(CACHE):
        return (expanded(chosen) / below,)
    caches = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return root / FOLDER, caches / "cloister" / below


def _opened(path: Path, shape: tuple[int, ...]) -> Decoded | None:
    """Return what is in a file; None if the file is missing or damaged."""
    try:
        pixels: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
        if pixels.shape != shape or pixels.dtype != np.float32:
            return None
        with path.open("rb") as file:
            file.seek(getattr(pixels, "offset", 0) + pixels.nbytes)  # the notes are behind the pixels
            notes = tuple(Note(*note) for note in json.load(file))
    except (OSError, ValueError, TypeError, EOFError):
        return None
    return Decoded(pixels, notes) if len(notes) == len(pixels) else None


def _write(source: Source, form: Form, ranks: NDArray[np.intp], path: Path) -> int:
    """Write rows one by one, and the notes behind them; return the number of images that memory did not suffice for.

    On a full disk this raises an error, whereas a mapped file would end the process.
    """
    lacking = 0
    with path.open("wb") as file:
        facts = {"descr": "<f4", "fortran_order": False, "shape": (len(ranks), *form.example)}
        npy.write_array_header_1_0(file, facts)
        start, unusable, notes = file.tell(), np.full(form.example, np.nan, "<f4"), [Note()] * len(ranks)
        for rank, content in zip(ranks.tolist(), source.contents(), strict=True):
            try:
                pixels, notes[rank] = decode(content, form)
            except Unreadable as reason:
                pixels, notes[rank] = unusable, Note(reason=str(reason))
                lacking += isinstance(reason, LacksMemory)
            file.seek(start + rank * unusable.nbytes)
            file.write(pixels.astype("<f4", copy=False).tobytes())
        file.seek(start + len(ranks) * unusable.nbytes)
        file.write(json.dumps(notes).encode())
    return lacking


def forget_the_oldest(place: Path) -> None:
    """Remove old files except the `KEPT` newest.

    Mapped files stay readable. Partial files of other processes are hidden, and are skipped.
    """
    files = [path for path in place.glob("*.npy") if not path.name.startswith(".")]
    for path in sorted(files, key=_written, reverse=True)[KEPT:]:
        path.unlink(missing_ok=True)


def _written(path: Path) -> int:
    """Return the modification time of a file; 0 if another process has removed it."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
