"""Cache of decoded images in a memory-mapped file.

The file's name is a digest of its sources, the image size and the order. A changed, new or removed source file gives
another name. The cache may be deleted at any time.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.core.files import atomic_path, expanded
from cloister.tasks.pictures.decode import grey
from cloister.tasks.pictures.picture import Source

VERSION = 2
"""Version of the decoding. Another version uses other cache files."""
FOLDER = ".cloister-cache"
CACHE = "CLOISTER_CACHE"
"""Environment variable that names another folder for all caches."""
KEPT = 4
"""Largest number of files in one cache folder: a server that chooses image sizes must not fill a node's disk."""
_writing = threading.Lock()


def decoded(source: Source, size: int, order: Sequence[int] | NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the pixels of images from a cache on disk.

    The first call makes the cache. It is beside the images, or below the user's cache folder if the first is not
    writable. If the environment variable `CLOISTER_CACHE` names a folder, the cache is only there.

    Args:
        source: of n images.
        size: height and width, in pixels.
        order: of the rows: row i is image `order[i]`. All n of them.

    Returns:
        Shape (n, size, size, 1), from 0 to 1, mapped into memory and read-only. A damaged image is NaN.

    Raises:
        DataError: neither place is writable, or a file of many images cannot be read.
    """
    files = [(path.relative_to(source.root).as_posix(), *_state(path)) for path in source.files]
    key = hashlib.sha256(repr((VERSION, size, list(map(int, order)), files)).encode()).hexdigest()[:32]
    ranks, name = np.argsort(np.asarray(order, np.intp)), f"{key}.npy"
    shape = (len(ranks), size, size, 1)
    for place in _places(source.root):
        found = _opened(place / name, shape)
        if found is not None:
            return found
    reasons = []
    for place in _places(source.root):
        try:
            # Images may be confidential: only this user may read the cache.
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _writing, atomic_path(place / name) as partial:
                _write(source, ranks, shape, partial)
                made = _opened(partial, shape)  # before another process can remove it
            _forget_the_oldest(place)
            message = "decoded images are kept in %s, and may be deleted; %s names another folder"
            logging.getLogger("cloister.tasks").warning(message, place, CACHE)
        except OSError as error:
            reasons.append(f"{place} ({error.strerror})")
            continue
        if made is not None:
            return made
        reasons.append(f"{place} (what was written cannot be read)")
    raise DataError(f"decoded images can be kept in none of {', '.join(reasons)}; set {CACHE} to another folder")


def _state(path: Path) -> tuple[int, ...]:
    """Return the size, inode and times of a file.

    It is empty for a missing file, whose image counts as damaged. Name, size and modification time alone may equal
    those of another site's file, whose cache is in the same place.
    """
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)


def _places(root: Path) -> tuple[Path, ...]:
    """Return the candidate cache folders, the preferred one first."""
    below = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    if chosen := os.environ.get(CACHE):
        return (expanded(chosen) / below,)
    caches = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return root / FOLDER, caches / "cloister" / below


def _opened(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """Return the array in a file; None if the file is missing or damaged."""
    try:
        pixels: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return pixels if pixels.shape == shape and pixels.dtype == np.float32 else None


def _write(source: Source, ranks: NDArray[np.intp], shape: tuple[int, ...], path: Path) -> None:
    """Write rows one by one.

    On a full disk this raises an error, whereas a mapped file would end the process.
    """
    with path.open("wb") as file:
        facts = {"descr": "<f4", "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, facts)
        start, row = file.tell(), 4 * shape[1] * shape[2]
        for rank, content in zip(ranks.tolist(), source.contents(), strict=True):
            pixels = grey(content, (shape[1], shape[2]))
            file.seek(start + rank * row)
            file.write(np.full(shape[1:], np.nan, "<f4").tobytes() if pixels is None else pixels.tobytes())


def _forget_the_oldest(place: Path) -> None:
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
