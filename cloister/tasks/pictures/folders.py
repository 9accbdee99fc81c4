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
        stray: names of files, below the root, that are no image or lie in no folder of a class; hidden ones aside.
    """

    root: Path
    files: tuple[Path, ...]
    pictures: tuple[Picture, ...]
    stray: tuple[str, ...] = ()

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
        folders = _class_folders(root, classes, tolerant)
        found = [
            (path, Picture(path.relative_to(root).as_posix(), label, part))
            for folder, label, part in folders
            for path in sorted(folder.rglob("*"))
            if is_image(path)
        ]
        files = tuple(path for path, _ in found)
        return cls(root, files, tuple(picture for _, picture in found), _stray(root, [each[0] for each in folders]))

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


def _stray(root: Path, folders: list[Path]) -> tuple[str, ...]:
    """Images beside the folders of the classes, and other files in these."""
    beside = [path for above in dict.fromkeys([root, *(each.parent for each in folders)]) for path in above.iterdir()]
    inside = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not is_image(path)]
    found = [*filter(is_image, beside), *(path for path in inside if not path.name.startswith("."))]
    return tuple(sorted(path.relative_to(root).as_posix() for path in found))


def _innermost(root: Path) -> Iterator[tuple[Path, Part]]:
    """The folders in a folder, and in place of `train` and `test` those in these."""
    for folder in folders_in(root):
        part = PARTS.get(folder.name.lower(), "")
        yield from ((inner, part) for inner in (folders_in(folder) if part else [folder]))
