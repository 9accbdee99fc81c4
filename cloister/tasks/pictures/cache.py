"""Decoded images in a file, so that they are decoded once and never held in memory as a whole.

The file's name is a digest of what it was made from: files that change, come or go, another size or another order make
another one. It may be deleted at any time.
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
"""Of how images are decoded: another one makes other files."""
FOLDER = ".cloister-cache"
CACHE = "CLOISTER_CACHE"
"""The environment variable that names another folder for all caches."""
KEPT = 4
"""Files that stay in one place: whoever chooses sizes must not be able to fill a disk."""
_writing = threading.Lock()
logger = logging.getLogger("cloister.tasks")


def decoded(source: Source, size: int, order: Sequence[int] | NDArray[np.intp]) -> NDArray[np.float32]:
    """The pixels of images, from a cache beside them, or below the user's cache folder if that cannot be written.

    Where the environment variable `CLOISTER_CACHE` names a folder, the cache is there, and nowhere else.

    Args:
        source: of n images.
        size: height and width, in pixels.
        order: of the rows: row i is image `order[i]`. All n of them.

    Returns:
        Shape (n, size, size, 1), from 0 to 1, mapped into memory and read-only. A damaged image is NaN.

    Raises:
        DataError: neither place can be written, or a file of many images cannot be read.
    """
    ranks, name = np.argsort(np.asarray(order, np.intp)), f"{_key(source, size, order)}.npy"
    shape = (len(ranks), size, size, 1)
    for place in _places(source.root):
        found = _opened(place / name, shape)
        if found is not None:
            return found
    return _made(source, ranks, shape, name)


def _key(source: Source, size: int, order: Sequence[int] | NDArray[np.intp]) -> str:
    files = [(path.relative_to(source.root).as_posix(), *_state(path)) for path in source.files]
    return hashlib.sha256(repr((VERSION, size, list(map(int, order)), files)).encode()).hexdigest()[:32]


def _state(path: Path) -> tuple[int, ...]:
    """Which file it is, its size and its times; of one that is gone, or was never there, nothing: its image is damaged.

    Name, size and time of writing alone may be those of another site's file, whose cache lies in the same place.
    """
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)


def _places(root: Path) -> tuple[Path, ...]:
    """Where a cache may lie, the better place first."""
    below = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    if chosen := os.environ.get(CACHE):
        return (expanded(chosen) / below,)
    caches = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return root / FOLDER, caches / "cloister" / below


def _opened(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """The file's array; None where there is no file, or one that was damaged."""
    try:
        pixels: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return pixels if pixels.shape == shape and pixels.dtype == np.float32 else None


def _made(source: Source, ranks: NDArray[np.intp], shape: tuple[int, ...], name: str) -> NDArray[np.float32]:
    reasons = []
    for place in _places(source.root):
        try:
            # Images may be somebody's secret: nobody else reads what is made of them.
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _writing, atomic_path(place / name) as partial:
                _write(source, ranks, shape, partial)
                made = _opened(partial, shape)  # before another process may forget it
            _forget_the_oldest(place)
            logger.warning("decoded images are kept in %s, and may be deleted; %s names another folder", place, CACHE)
        except OSError as error:
            reasons.append(f"{place} ({error.strerror})")
            continue
        if made is not None:
            return made
        reasons.append(f"{place} (what was written cannot be read)")
    raise DataError(f"decoded images can be kept in none of {', '.join(reasons)}; set {CACHE} to another folder")


def _write(source: Source, ranks: NDArray[np.intp], shape: tuple[int, ...], path: Path) -> None:
    """Write rows one by one: a full disk is an error here, and would end the process if the file were mapped."""
    with path.open("wb") as file:
        facts = {"descr": "<f4", "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, facts)
        start, row = file.tell(), 4 * shape[1] * shape[2]
        for rank, content in zip(ranks.tolist(), source.contents(), strict=True):
            pixels = grey(content, (shape[1], shape[2]))
            file.seek(start + rank * row)
            file.write(np.full(shape[1:], np.nan, "<f4").tobytes() if pixels is None else pixels.tobytes())


def _forget_the_oldest(place: Path) -> None:
    """Remove all but the newest files; whoever has one mapped keeps it. What another process is writing is hidden."""
    files = [path for path in place.glob("*.npy") if not path.name.startswith(".")]
    for path in sorted(files, key=_written, reverse=True)[KEPT:]:
        path.unlink(missing_ok=True)


def _written(path: Path) -> int:
    """When a file was written; 0 of one that another process has removed."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
