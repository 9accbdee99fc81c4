"""Base class of tasks on grey images in class folders or parquet files, and the cache of their pixels.

Decoded images are in a memory-mapped file. Its name is a digest of its sources, the image size and the order. A
changed, new or removed source file gives another name. The cache may be deleted at any time.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Task
from cloister.tasks.partition import SPLIT_SEED, holdout
from cloister.tasks.pictures.decode import grey
from cloister.tasks.pictures.sources import FolderPerClass, Source, class_named, every_picture, find_pictures, labels_of
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.files import atomic_path, expanded
from cloister.utils.text import counted

VERSION = 2
"""Version of the decoding. Another version uses other cache files."""
FOLDER = ".cloister-cache"
CACHE = "CLOISTER_CACHE"
"""Environment variable that names another folder for all caches."""
KEPT = 4
"""Largest number of files in one cache folder: a server that chooses image sizes must not fill a node's disk."""
NAMED = 10
"""Largest number of damaged or stray files that a message names."""
logger = logging.getLogger("cloister.tasks")
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
            logger.warning("decoded images are kept in %s, and may be deleted; %s names another folder", place, CACHE)
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


class PictureTask(Task):
    """Images of the classes in `class_names`. x is float32 of shape (n, size, size, 1), from 0 to 1.

    Images are decoded once, into a file that is mapped into memory.

    Attributes:
        usual_size: height and width if `task.image-size` is `auto`.
        smallest_size: smallest height and width that the network accepts.
    """

    usual_size: ClassVar[int]
    smallest_size: ClassVar[int] = 1
    decodes = True

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        self.size = self.usual_size if config.image_size == "auto" else config.image_size
        if self.size < self.smallest_size:
            key = "usual_size" if config.image_size == "auto" else "task.image-size"
            raise ConfigError(
                f"{key} = {self.size} is not valid: the network of task {config.name!r} takes images of "
                f"{self.smallest_size} pixels and more"
            )
        self.input_shape = (self.size, self.size, 1)
        self.image_shape = (self.size, self.size)

    def load(self) -> Dataset:
        """Return the benchmark data at `task.data-path`.

        It has the folders `train` and `test`. Of a single set of images, a fifth of each class is test data.

        Raises:
            DataError: there are no such images.
        """
        if not self.config.data_path:
            raise DataError(
                f"task.data-path = '' must be a folder of images, or a parquet file, of the {self.classes} classes"
            )
        return self.load_from(expanded(self.config.data_path))

    def load_from(self, path: Path) -> Dataset:
        """Return the benchmark data in a folder of images or a parquet file.

        Raises:
            DataError: there are no such images.
        """
        try:
            source = find_pictures(path, self.class_names)
            self._tell_stray(source)
            self.checked_targets(labels_of(source), source.root)
            return self.dataset(source)
        except DataError as error:
            raise DataError(f"task.data-path: {str(error).removeprefix('data-path: ')}") from None

    def dataset(self, source: Source) -> Dataset:
        """Split the images into training and test data.

        Args:
            source: of all images.
        """
        train, test = self.undamaged(source, parts_of(source, self.drawn_test))
        return Dataset(train, test)

    def drawn_test(self, labels: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the indices of a random test part: a fifth of each class.

        It is used for images without a split.

        Args:
            labels: of all images, shape (n,).
        """
        return holdout(labels, 0.2, np.random.default_rng(SPLIT_SEED))[1]

    def read(self, path: Path) -> Examples:
        """Return a node's own data as `rows` does, after checking it.

        If `task.skip-damaged` is on, damaged images are left out.

        Raises:
            DataError: there are no such images, or damaged ones.
        """
        if path.suffix.lower() == ".npz":
            return super().read(path)
        source = self._own(path)
        self._tell_stray(source)
        (examples,) = self.undamaged(source, [np.arange(len(source.pictures))])
        return self.checked(examples, path)

    def rows(self, path: Path) -> Examples:
        """Return a node's own data, with NaN for a damaged image.

        It is in class folders, in parquet files, or in an `.npz` file in the units of x.

        Raises:
            DataError: there are no such images.
        """
        if path.suffix.lower() == ".npz":
            return super().rows(path)
        source = self._own(path, tolerant=True)
        return Examples(decoded(source, self.size, range(len(source.pictures))), labels_of(source))

    def label_of_folder(self, name: str) -> int | None:
        """Return the class that the folder's name matches; None: no class.

        Case, spaces and punctuation are ignored.
        """
        return class_named(name, self.class_names)

    def _own(self, path: Path, tolerant: bool = False) -> Source:
        self.refuse_groups(path)
        try:
            # A site names the exact folder: an image beside the others must not change where images are searched.
            return every_picture(path, self.class_names) if tolerant else find_pictures(path, self.class_names, False)
        except DataError as error:
            raise DataError(f"data-path: {error}") from None

    def undamaged(self, source: Source, parts: Sequence[NDArray[np.intp]]) -> list[Examples]:
        """Return the images of each part, without the damaged ones.

        Args:
            source: of the images.
            parts: indices of the images of each part.

        Returns:
            The examples of each part: x of shape (n, size, size, 1), from 0 to 1.

        Raises:
            DataError: an image is damaged, and `task.skip-damaged` is off.
        """
        order = np.concatenate(parts)
        pixels, labels = decoded(source, self.size, order), labels_of(source)[order]
        damaged = np.isnan(pixels[:, 0, 0, 0])
        if damaged.any():
            names = [source.pictures[number].name for number in np.sort(order[damaged])]
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            what = f"{source.root} holds {counted(len(names), 'damaged image')}: {', '.join(names[:NAMED])}{more}"
            if not self.config.skip_damaged:
                raise DataError(f"data-path: {what}; remove them, or set task.skip-damaged = true")
            logger.warning("%s; they are left out", what)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        pieces = zip(np.split(pixels, ends), np.split(labels, ends), np.split(~damaged, ends), strict=True)
        # A part without damage stays memory-mapped; taking rows copies them.
        return [Examples(x, y) if good.all() else Examples(x, y).take(np.flatnonzero(good)) for x, y, good in pieces]

    def _tell_stray(self, source: Source) -> None:
        """Warn of files and links to folders that are left out.

        The user may expect them to be used.
        """
        if isinstance(source, FolderPerClass) and source.stray:
            names, number = ", ".join(source.stray[:NAMED]), counted(len(source.stray), "file")
            logger.warning("%s: %s or links left out, as no image of a class: %s", source.root, number, names)


def parts_of(source: Source, draw: Callable[[NDArray[np.int64]], NDArray[np.intp]]) -> list[NDArray[np.intp]]:
    """Return the indices of the training images and of the test images.

    Args:
        source: of the images.
        draw: maps labels to the indices of a test part, for images without a split.

    Raises:
        DataError: some images are outside the parts of the split, or one part is missing.
    """
    labels, parts = labels_of(source), np.array([picture.part for picture in source.pictures])
    match sorted(set(parts.tolist())):
        case ["test", "train"]:
            test = np.flatnonzero(parts == "test")
        case [""]:
            test = draw(labels)
        case found:
            raise DataError(
                f"{source.root} must hold images to train on and to test on, or all of them together; found "
                f"{' and '.join(part or 'some beside them' for part in reversed(found))}"
            )
    return [np.setdiff1d(np.arange(len(labels)), test), test]
