"""Shared parts of the scripts: options, where data can be had, cells in turn, and tables beside a paper's figures."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console

from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import Outcome
from cloister.simulation.simulate import simulate

Cell = TypeVar("Cell")
NONE = "–"
"""What a table says where there is no figure."""
FOLDER = Path("runs") / "experiments"
"""Default of `--results`, outside the committed results."""


class Source(NamedTuple):
    """Data that a script reads.

    Attributes:
        files: patterns of its files, in the given folder or one below.
        origin: where it can be had, and in what form a script reads it.
    """

    files: tuple[str, ...]
    origin: str


SOURCES: Mapping[str, Source] = {
    "mnist": Source(
        ("mnist.npz",),
        "mnist.npz in Keras' layout, from https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
    ),
    "mnist-writers": Source(
        ("mnist.npz", "mnist_writer_ids.npz"),
        "mnist.npz, and mnist_writer_ids.npz with train_writer and test_writer: column 2 of QMNIST's train labels and "
        "of the first 10,000 test labels, from https://github.com/facebookresearch/qmnist",
    ),
    "emnist": Source(
        ("emnist_byclass_test.npz",),
        "emnist_byclass_test.npz with x, upright images in bytes, and y: the ByClass test split, from "
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
    ),
    "femnist": Source(
        ("*.json",),
        "the .json files of data/femnist of https://github.com/TalwalkarLab/leaf, which its preprocess.sh makes; or "
        "femnist.npz with x, images in bytes, y and writer, named as a file",
    ),
    "heart-disease": Source(
        ("processed.cleveland.data", "processed.hungarian.data", "processed.switzerland.data", "processed.va.data"),
        "the four processed.*.data of https://archive.ics.uci.edu/dataset/45/heart+disease",
    ),
    "hospital-charges": Source(
        ("IPPS_DRG_CSV.zip", "us_zip_latlon.csv"),
        "IPPS_DRG_CSV.zip, inpatient charges of fiscal year 2011, from https://data.cms.gov, and us_zip_latlon.csv "
        "with columns zip, lat, lon, as from https://download.geonames.org/export/zip",
    ),
    "alzheimer-mri": Source(
        (),
        "a folder of the images for each class, or the parquet files of "
        "https://huggingface.co/datasets/Falah/Alzheimer_MRI",
    ),
}
"""By task. No script downloads any."""


def parser(about: str | None, sources: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with `--results`, and with `--data` for a script that reads data.

    Args:
        about: docstring of the script.
        sources: names in `SOURCES` of the data that it reads.
    """
    origins = "\n".join(f"  {name}: {SOURCES[name].origin}" for name in sources)
    made = argparse.ArgumentParser(
        description=about,
        epilog=f"Data is not downloaded. Where it can be had:\n{origins}" if sources else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--results",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help=f"of results; what is in it is not run again (default: {FOLDER}; committed: experiments/results)",
    )
    if sources:
        made.add_argument("--data", default="", metavar="FOLDER", help="of the data, see below")
    return made


def data_at(place: str, name: str) -> str:
    """Return where data is, after a look whether it is there.

    Args:
        place: a file, or a folder with the files or one above it.
        name: in `SOURCES`.

    Raises:
        SystemExit: it is not there. The message says where it can be had.
    """
    path, source = Path(place).expanduser(), SOURCES[name]
    of_folder = path.is_dir() and all([*path.glob(file), *path.glob(f"*/{file}")] for file in source.files)
    if not place or not (path.is_file() or of_folder):
        missing = " and ".join(source.files) or "folder"
        raise SystemExit(f"--data leads to {place!r}, where no {missing} is. {name}: {source.origin}")
    return str(path)


def simulated(
    settings: Mapping[str, Any], clients: int | None = None, narrator: ConsoleReporter | None = None
) -> Outcome:
    """Run a federation without output, to its end.

    Args:
        settings: dotted keys of its configuration.
        clients: number of clients; None: the default.
        narrator: takes note of the rounds.

    Raises:
        SystemExit: the run ended early, such as by Ctrl-C or SIGTERM. So a part is not kept as the whole.
    """
    outcome = simulate(settings, clients, narrator or ConsoleReporter(1, Console(quiet=True)))
    if outcome.ended != "as-asked":
        raise SystemExit(f"a run ended early, and is not kept: {outcome.stopped}")
    return outcome


def in_turn(left: Sequence[Cell], seconds: float, units: Callable[[Cell], float] = lambda _: 1.0) -> Iterator[Cell]:
    """Give each cell, and say before it how many hours it and those behind it take, by how long the last one took.

    Args:
        left: cells whose results are not there.
        seconds: of a unit, for the first estimate.
        units: how long a cell takes beside others, such as its number of rounds.
    """
    for number, cell in enumerate(left):
        hours = seconds * sum(map(units, left[number:])) / 3600
        print(f"{len(left) - number} cells to go, about {hours:.1f} hours: {cell}", flush=True)
        start = time.perf_counter()
        yield cell
        seconds = (time.perf_counter() - start) / units(cell)
    print("all cells are there")


def write_table(place: Path, about: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a Markdown table down, and show it.

    Args:
        place: of the file; its folder is made.
        about: a paragraph above the table.
        head: the names of the columns.
        rows: of one cell for each column.
    """
    lines = [about, "", _row(head), _row(["---"] * len(head)), *map(_row, rows)]
    text = "\n".join(lines) + "\n"
    print(text)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def apart(ours: float | None, paper: float | None, deviation: float) -> str:
    """Return the difference from the paper in its standard deviations; "–" where a figure is missing.

    Args:
        ours, paper: the figures.
        deviation: the paper's, above 0.
    """
    return NONE if ours is None or paper is None else f"{(ours - paper) / deviation:+.1f}"
