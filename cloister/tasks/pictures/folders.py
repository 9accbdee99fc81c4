"""A folder for each class, as published sets of images are unpacked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.core.errors import DataError
from cloister.tasks.pictures.decode import is_image
from cloister.tasks.pictures.picture import Part, Picture, class_named

PARTS: dict[str, Part] = {"train": "train", "test": "test"}
"""Folders that stand above those of the classes, by their names in small letters."""


@dataclass(frozen=True)
class FolderPerClass:
    """A `Source` of one image a file.

    Attributes:
        root: the folder above those of the classes, or above `train` and `test`.
        files: of the images.
        pictures: in the order of `files`.
    """

    root: Path
    files: tuple[Path, ...]
    pictures: tuple[Picture, ...]

    @classmethod
    def at(cls, root: Path, classes: Sequence[str], tolerant: bool = False) -> "FolderPerClass":
        """The images in the folders of the classes, which may lie below `train` and `test`.

        Args:
            root: see above.
            classes: the task's names, in its order.
            tolerant: leave out images in folders of no class.

        Raises:
            DataError: beside folders of classes there is one with images that is named like no class.
        """
        found = [
            (path, Picture(path.relative_to(root).as_posix(), label, part))
            for folder, label, part in _class_folders(root, classes, tolerant)
            for path in sorted(folder.rglob("*"))
            if is_image(path)
        ]
        return cls(root, tuple(path for path, _ in found), tuple(picture for _, picture in found))

    def contents(self) -> Iterator[bytes]:
        """The files, one after another."""
        for path in self.files:
            try:
                yield path.read_bytes()
            except OSError:
                yield b""


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder that are not hidden, by name."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _class_folders(root: Path, classes: Sequence[str], tolerant: bool) -> list[tuple[Path, int, Part]]:
    """Every folder of a class, with the number of the class and the part that it is in."""
    found = [(folder, class_named(folder.name, classes), part) for folder, part in _innermost(root)]
    named = [(folder, label, part) for folder, label, part in found if label is not None]
    others = [folder for folder, label, _ in found if label is None and any(map(is_image, folder.iterdir()))]
    if named and others and not tolerant:
        name = others[0].relative_to(root)
        raise DataError(f"{root}: the folder {name} holds images and is named like no class: {', '.join(classes)}")
    return named


def _innermost(root: Path) -> Iterator[tuple[Path, Part]]:
    """The folders in a folder, and in place of `train` and `test` those in these."""
    for folder in folders_in(root):
        part = PARTS.get(folder.name.lower(), "")
        yield from ((inner, part) for inner in (folders_in(folder) if part else [folder]))
