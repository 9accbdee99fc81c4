"""Images in a folder per class, the layout of many published datasets."""

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

from cloister.core.errors import DataError
from cloister.tasks.pictures.decode import is_image
from cloister.tasks.pictures.formats import MAX_BYTES
from cloister.tasks.pictures.picture import Part, Picture, class_named

PARTS: dict[str, Part] = {"train": "train", "test": "test"}
"""Folders above the class folders, by their names in lower case."""


@dataclass(frozen=True)
class FolderPerClass:
    """`Source` of one image per file.

    Attributes:
        root: the folder above the class folders, or above `train` and `test`.
        files: of the images.
        pictures: in the order of `files`.
        stray: names, below the root, of visible non-image files, of images outside class folders, and of links to
            folders.
    """

    root: Path
    files: tuple[Path, ...]
    pictures: tuple[Picture, ...]
    stray: tuple[str, ...] = ()

    @classmethod
    def at(cls, root: Path, classes: Sequence[str], tolerant: bool = False) -> "FolderPerClass":
        """Find the images in the class folders, which may be below `train` and `test`.

        Args:
            root: see above.
            classes: the task's names, in its order.
            tolerant: leave out images in folders of no class.

        Raises:
            DataError: beside class folders there is a folder with images whose name matches no class.
        """
        folders: list[tuple[Path, int, Part]] = []
        others: list[Path] = []
        for folder in folders_in(root):
            # The folders inside `train` and `test` replace these two.
            part = PARTS.get(folder.name.lower(), "")
            for inner in folders_in(folder) if part else [folder]:
                label = class_named(inner.name, classes)
                if label is not None:
                    folders.append((inner, label, part))
                elif any(map(is_image, _entries(inner))):
                    others.append(inner)
        if folders and others and not tolerant:
            name = others[0].relative_to(root)
            raise DataError(f"{root}: the folder {name} holds images and is named like no class: {', '.join(classes)}")
        found = [
            (path, Picture(path.relative_to(root).as_posix(), label, part))
            for folder, label, part in folders
            for path in _files_below(folder)
            if is_image(path)
        ]
        files = tuple(path for path, _ in found)
        return cls(root, files, tuple(picture for _, picture in found), _stray(root, [each[0] for each in folders]))

    def contents(self) -> Iterator[bytes]:
        """Yield the contents of the files, in order."""
        return map(_content, self.files)


def folders_in(folder: Path) -> list[Path]:
    """Return the visible folders in a folder, by name.

    Links to folders are skipped: if the target is here too, its images would count twice.
    """
    return [path for path in _entries(folder) if _is_folder(path) and not path.name.startswith(".")]


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder, by name.

    If the folder is unreadable, log this and return an empty list. This module uses `os.path` to test paths: `Path`
    raises for one behind an inaccessible link.
    """
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        message = "%s cannot be read (%s); what is in it is left out"
        logging.getLogger("cloister.tasks").log(WARNING, message, error.filename, error.strerror)
        return []


def _files_below(folder: Path) -> list[Path]:
    """Return the files in a folder and all its subfolders, and links to files."""
    found, left = [], [folder]
    while left:
        for path in _entries(left.pop()):
            if _is_folder(path):
                left.append(path)
            elif not os.path.isdir(path):
                found.append(path)
    return sorted(found)


def _content(path: Path) -> bytes:
    """Return the bytes of a file.

    They are empty if the file is unreadable, too large, or not regular (a pipe would block).
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_BYTES else b""
    except OSError:
        return b""


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _stray(root: Path, folders: list[Path]) -> tuple[str, ...]:
    """Return the files and links that are left out.

    These are images and links to folders beside the class folders, and visible non-image files inside these.
    """
    beside = [path for above in dict.fromkeys([root, *(each.parent for each in folders)]) for path in _entries(above)]
    inside = [path for folder in folders for path in _files_below(folder) if not is_image(path)]
    left_out = [path for path in beside if is_image(path) or (os.path.isdir(path) and not _is_folder(path))]
    found = [*left_out, *(path for path in inside if not path.name.startswith("."))]
    return tuple(sorted(path.relative_to(root).as_posix() for path in found))
