"""Base class of tasks on images in class folders, beside a table or in parquet files.

Their pixels come from the cache of `cache.py`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Task
from cloister.tasks.partition import SPLIT_SEED, holdout
from cloister.tasks.pictures.cache import decoded
from cloister.tasks.pictures.finding import every_picture, find_pictures, sites_in
from cloister.tasks.pictures.form import COLOURS, Form, Note
from cloister.tasks.pictures.sources import PATIENT, Source, class_named, folders_in, labels_of, patient_in
from cloister.tasks.splits import dataset_of_sites
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.files import expanded
from cloister.utils.text import counted, first_of, spanned

NAMED = 10
"""Largest number of unusable or stray files that a message names."""
REASONS = 3
"""Largest number of reasons that an error has."""
logger = logging.getLogger("cloister.tasks")


class PictureTask(Task):
    """Images of the classes in `class_names`. x is float32 of shape (n, size, size, channels), from 0 to 1.

    Images are decoded once, into a file that is mapped into memory. The scale of their values is one of constants of
    the task and of each file's own header (see `Form`).

    Attributes:
        usual_size: height and width if `task.image-size` is `auto`.
        smallest_size: smallest height and width that the network accepts.
        channels, bits, window, slices: see `Form`. With several slices x has shape (n, slices, size, size, channels).
        found: the files that were read, and what was found in them, by their folder.
    """

    usual_size: ClassVar[int]
    smallest_size: ClassVar[int] = 1
    channels: ClassVar[int] = 1
    bits: ClassVar[int | None] = None
    window: ClassVar[tuple[float, float] | None] = None
    slices: ClassVar[int | None] = None
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
        self.form = Form((self.size, self.size), self.channels, self.bits, self.window, self.slices)
        self.input_shape = self.form.example
        self.image_shape = (self.size, self.size) if self.input_shape == (self.size, self.size, 1) else None
        self.found: dict[Path, tuple[Source, tuple[Note, ...]]] = {}

    def load(self) -> Dataset:
        """Return the benchmark data at `task.data-path`.

        It has the folders `train` and `test`. Of a single set of images, a fifth of each class is test data.

        Raises:
            DataError: there are no such images.
        """
        if not self.config.data_path:
            raise DataError(
                f"task.data-path = '' must be a folder of images, labels.csv, or a parquet file, of the {self.classes} "
                "classes"
            )
        return self.load_from(expanded(self.config.data_path))

    def load_from(self, path: Path) -> Dataset:
        """Return the benchmark data in a folder of images or a parquet file.

        With `task.partition = "natural"` each folder in it is a site, and read as that site would read it. A fifth of
        each class of each site is test data.

        Raises:
            DataError: there are no such images.
        """
        try:
            if self.config.partition == "natural":
                return dataset_of_sites(self, path, folders_in(path) if path.is_dir() else [])
            source = find_pictures(path, self.class_names, group=self.config.group)
            self._tell_stray(source)
            if self.config.partition == "auto" and (sites := sites_in(path, self.class_names)):
                held = counted(sites, "folder")
                logger.warning("%s: %s of images; task.partition = 'natural' makes each a site", path, held)
            faultless = [not picture.fault for picture in source.pictures]
            self.checked_targets(labels_of(source)[faultless], source.root)
            return self.dataset(source)
        except DataError as error:
            error = error.of("task.data-path")
            if not self.config.data_path:  # the images of a new package
                instead = "replace the images there, if they are made up, or set task.data-path"
                error = DataError(f"{error}; {instead}", error.first)
            raise error from None

    def dataset(self, source: Source) -> Dataset:
        """Split the images into training and test data.

        Args:
            source: of all images.
        """
        train, test = self.undamaged(source, parts_of(source, self.drawn_test))
        return Dataset(train, test, groups=self.groups_of(train))

    def groups_of(self, train: Examples) -> Mapping[str, NDArray]:
        """Return the groups of training examples as `Dataset.groups` has them."""
        return {} if train.groups is None else {self.config.group: train.groups}

    def drawn_test(self, labels: NDArray[np.int64], groups: NDArray[np.str_] | None) -> NDArray[np.intp]:
        """Return the indices of a random test part: a fifth of each class, in whole groups.

        It is used for images without a split.

        Args:
            labels: of all images, shape (n,).
            groups: of all images, shape (n,); None: `task.group` is empty.
        """
        return holdout(labels, 0.2, np.random.default_rng(SPLIT_SEED), groups)[1]

    def read(self, path: Path) -> Examples:
        """Return a node's own data as `rows` does, after checking it.

        If `task.skip-damaged` is on, unusable images are left out.

        Raises:
            DataError: there are no such images, or unusable ones.
        """
        if path.suffix.lower() == ".npz":
            return super().read(path)
        source = self._own(path)
        self._tell_stray(source)
        (examples,) = self.undamaged(source, [np.arange(len(source.pictures))])
        return self.checked(examples, path)

    def rows(self, path: Path) -> Examples:
        """Return a node's own data, with NaN for an unusable image.

        It is in class folders, beside a table, in parquet files, or in an `.npz` file in the units of x.

        Raises:
            DataError: there are no such images.
        """
        if path.suffix.lower() == ".npz":
            return super().rows(path)
        source = self._own(path, tolerant=True)
        self._tell_stray(source)
        order = np.arange(len(source.pictures))
        found, reasons = self._decoded(source, order)
        self._tell_unusable(source, order, reasons)
        return Examples(found, labels_of(source), self._groups(source, order))

    def label_of_folder(self, name: str) -> int | None:
        """Return the class that the folder's name matches; None: no class.

        Case, spaces and punctuation are ignored.
        """
        return class_named(name, self.class_names)

    def _own(self, path: Path, tolerant: bool = False) -> Source:
        group = self.config.group
        try:
            # A site names the exact folder: an image beside the others must not change where images are searched.
            if tolerant:
                return every_picture(path, self.class_names, group)
            return find_pictures(path, self.class_names, False, group)
        except DataError as error:
            raise DataError(f"data-path: {error}") from None

    def undamaged(self, source: Source, parts: Sequence[NDArray[np.intp]]) -> list[Examples]:
        """Return the images of each part, without the unusable ones.

        Args:
            source: of the images.
            parts: indices of the images of each part.

        Returns:
            The examples of each part: x as the class has it, from 0 to 1.

        Raises:
            DataError: an image is unusable, and `task.skip-damaged` is off; or all are.
        """
        order = np.concatenate(parts)
        pixels, reasons = self._decoded(source, order)
        labels, groups = labels_of(source)[order], self._groups(source, order)
        unusable = Counter(reasons[reasons != ""].tolist())
        if len(unusable) != 1 or unusable.total() < len(order):  # else the error has all there is to tell
            self._tell_unusable(source, order, reasons)
        if unusable and (not self.config.skip_damaged or unusable.total() == len(order)):
            why = "; ".join(
                f"{reason} ({counted(number, 'image')})" for reason, number in unusable.most_common(REASONS)
            )
            more = f"; and {len(unusable) - REASONS} more reasons" if len(unusable) > REASONS else ""
            skip = "" if unusable.total() == len(order) else ". task.skip-damaged = true leaves them out"
            raise DataError(
                f"data-path: {source.root}: {unusable.total()} of {counted(len(order), 'image')} cannot be used: {why}"
                f"{more}{skip}",
                f"{source.pictures[order[reasons != ''].min()].name} is the first",
            )
        examples, usable = Examples(pixels, labels, groups), reasons == ""
        pieces = np.split(np.arange(len(order)), np.cumsum([len(part) for part in parts])[:-1])
        # A part without unusable images stays memory-mapped; taking rows copies them.
        return [
            Examples(pixels[rows[0] : rows[-1] + 1], labels[rows], None if groups is None else groups[rows])
            if len(rows) and usable[rows].all()
            else examples.take(rows[usable[rows]])
            for rows in pieces
        ]

    def _decoded(self, source: Source, order: NDArray[np.intp]) -> tuple[NDArray[np.float32], NDArray[np.str_]]:
        """Return pixels, and the reason why each image is unusable, shape (n,); empty if it is not."""
        found = decoded(source, self.form, order)
        pairs = zip(found.notes, order.tolist())
        notes = [note._replace(reason=source.pictures[number].fault or note.reason) for note, number in pairs]
        self.found[source.root] = source, tuple(notes)
        return found.pixels, np.array([note.reason for note in notes], np.str_)

    def _groups(self, source: Source, order: NDArray[np.intp]) -> NDArray[np.str_] | None:
        return np.array([picture.group for picture in source.pictures], np.str_)[order] if self.config.group else None

    def _tell_unusable(self, source: Source, order: NDArray[np.intp], reasons: NDArray[np.str_]) -> None:
        """Warn of unusable images in this machine's log alone: a file name may be a person's."""
        unusable, causes = Counter(reasons[reasons != ""].tolist()), list[str]()
        for reason, _ in unusable.most_common():
            names = [source.pictures[place].name for place in np.sort(order[reasons == reason]).tolist()]
            causes.append(f"{reason}: {first_of(names, NAMED)}")
        if causes:
            images = counted(unusable.total(), "image")
            logger.warning("%s: %s cannot be used: %s", source.root, images, "; ".join(causes))

    def described(self) -> Iterator[tuple[Literal["ok", "note", "warn"], str]]:
        """Yield sentences about the files that were read, for their owner: kind of line (ok, note, warn) and text."""
        for root, (_, notes) in self.found.items():
            usable = [note for note in notes if not note.reason]
            if not usable:
                continue
            if reasons := Counter(note.reason for note in notes if note.reason):
                yield ("warn", f"{root}: {counted(reasons.total(), 'image')} left out: {_told(reasons)}")
            kinds, scales, colours, pages = (
                Counter(note.kind for note in usable),
                Counter(note.scale for note in usable),
                Counter(COLOURS[note.channels] for note in usable),
                Counter(f"{note.pages} pages" if note.pages > 1 else "one page" for note in usable),
            )
            heights, widths = ([getattr(note, side) for note in usable] for side in ("height", "width"))
            yield (
                "ok",
                f"{root}: {len(usable)} of {counted(len(notes), 'image')} can be used: "
                f"{'; '.join(map(_told, (kinds, scales, colours, pages)))}; "
                f"{spanned(min(heights), max(heights))} rows, {spanned(min(widths), max(widths))} columns",
            )
            if len(scales) > 1:
                yield (
                    "warn",
                    f"{root}: images have {len(scales)} scales, and one tissue may have several values; window in the "
                    "task gives DICOM and NIfTI one scale; convert other files to one kind",
                )
            elif any("each file" in scale for scale in scales):
                yield ("note", f"{root}: each file has a scale of its own; window in the task gives all the same")
        for text in self.ungrouped():
            yield "note", text

    def ungrouped(self) -> Iterator[str]:
        """Yield a sentence for each folder with several DICOM files of a patient, if `task.group` is empty."""
        for root, (source, notes) in self.found.items():
            if self.config.group or all(note.reason or note.kind != "DICOM" for note in notes):
                continue
            patients = [patient for patient, _ in map(patient_in, source.files) if patient]
            if len(set(patients)) < len(patients):
                yield (
                    f"{root}: {len(patients)} files have a {PATIENT} of {counted(len(set(patients)), 'patient')}; "
                    f"task.group = {PATIENT!r} protects patients"
                )

    def _tell_stray(self, source: Source) -> None:
        """Warn of files and links to folders that are left out.

        The user may expect them to be used.
        """
        if stray := getattr(source, "stray", ()):
            names, number = first_of(stray, NAMED), counted(len(stray), "file")
            logger.warning("%s: %s or links left out, as no image of a class: %s", source.root, number, names)


def _told(counts: Counter[str]) -> str:
    """Return names with their numbers, the most frequent first."""
    return ", ".join(f"{name} ({number})" for name, number in counts.most_common(NAMED))


Draw = Callable[[NDArray[np.int64], NDArray[np.str_] | None], NDArray[np.intp]]
"""Maps labels and groups of all images to the indices of a test part."""


def parts_of(source: Source, draw: Draw) -> list[NDArray[np.intp]]:
    """Return the indices of the training images and of the test images.

    Args:
        source: of the images.
        draw: for images without a split.

    Raises:
        DataError: some images are outside the parts of the split, or one part is missing.
    """
    labels, parts = labels_of(source), np.array([picture.part for picture in source.pictures])
    match sorted(set(parts.tolist())):
        case ["test", "train"]:
            test = np.flatnonzero(parts == "test")
        case [""]:
            groups = np.array([picture.group for picture in source.pictures], np.str_)
            test = draw(labels, groups if any(groups) else None)
        case found:
            raise DataError(
                f"{source.root} must hold images to train on and to test on, or all of them together; found "
                f"{' and '.join(part or 'some beside them' for part in reversed(found))}"
            )
    return [np.setdiff1d(np.arange(len(labels)), test), test]
