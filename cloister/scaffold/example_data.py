"""Synthetic examples for a new task, sufficient to see it learn."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import Generator

ENDINGS = {"csv": ".csv", "npz": ".npz", "images": ""}
"""Source of a task's data -> suffix of a site's data."""
PUBLIC, SITES = {"train": 400, "test": 100}, {"site-a": 200, "site-b": 200}
"""Number of examples in each public part, and in the data of each site."""


def write_examples(source: str, package: Path, sites: Path) -> None:
    """Write the parts of a benchmark, and the data of two sites.

    Args:
        source: csv, npz or images.
        package: folder of the benchmark, which is installed with the package; made if absent.
        sites: folder of the sites' data, outside the package: data in a package is copied to every installation.
    """
    rng = np.random.default_rng(0)
    package.mkdir(parents=True, exist_ok=True)
    for folder, parts in ((package, PUBLIC), (sites, SITES)):
        for part, count in parts.items():
            WRITERS[source](folder / f"{part}{ENDINGS[source]}", count, rng)


def _write_csv(path: Path, count: int, rng: Generator) -> None:
    """Write two classes that differ in age and dose."""
    age, pressure, dose = rng.uniform(18, 100, count), rng.uniform(60, 260, count), rng.uniform(0, 10, count)
    ill = age / 82 - dose / 10 + rng.normal(0, 0.1, count) > 0.2
    rows = zip(age, pressure, dose, np.where(ill, "ill", "healthy"), strict=True)
    lines = [f"{one:.0f},{two:.0f},{three:.1f},{name}" for one, two, three, name in rows]
    path.write_text("\n".join(["age,pressure,dose,outcome", *lines]) + "\n")


def _write_npz(path: Path, count: int, rng: Generator) -> None:
    """Write three classes that differ in the range of their numbers."""
    y = rng.integers(0, 3, count)
    x = rng.uniform(0, 0.6, (count, 12)) + 0.2 * y[:, None]
    np.savez(path, x=x.astype(np.float32), y=y)


def _write_images(folder: Path, count: int, rng: Generator) -> None:
    """Write bright squares and bright rings, in a folder for each class."""
    import cv2

    for number in range(count):
        name = ("square", "ring")[number % 2]
        image = rng.integers(0, 60, (32, 32)).astype(np.uint8)
        left, top, size = (int(rng.integers(low, high)) for low, high in ((2, 14), (2, 14), (10, 16)))
        cv2.rectangle(image, (left, top), (left + size, top + size), 230, -1 if name == "square" else 2)
        (folder / name).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / name / f"{number:03}.png"), image)


WRITERS: dict[str, Callable[[Path, int, Generator], None]] = {
    "csv": _write_csv,
    "npz": _write_npz,
    "images": _write_images,
}
