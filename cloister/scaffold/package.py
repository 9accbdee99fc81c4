"""Packages from templates: every file rendered, with synthetic data for a task."""

import json
import keyword
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from shutil import rmtree

import numpy as np
from numpy.random import Generator

from cloister.config.io import as_pairs
from cloister.scaffold.inference import Guess
from cloister.utils.errors import ConfigError

ENDINGS = {"csv": ".csv", "npz": ".npz", "images": ""}
"""Source of a task's data -> suffix of a site's data."""
PUBLIC, SITES = {"train": 400, "test": 100}, {"site-a": 200, "site-b": 200}
"""Number of examples in each public part, and in the data of each site."""
FRAMEWORKS = {"keras": ("tensorflow", "keras"), "torch": ("torch", "safetensors"), "numpy": ()}
"""Framework of a task's model, which is the name of Cloister's extra -> packages that it needs."""
GROUPS = {"task": "tasks", "strategy": "strategies", "mechanism": "mechanisms"}
"""Kind of package -> its group of entry points."""
MADE_UP = Guess(
    {"age": "Number(18, 100)", "pressure": "Number(60, 260)", "dose": "Number(0, 10)"},
    notes={},
    missing={},
    target="outcome",
    site="",
    patient="",
    names=(),
    classes={"healthy": ("healthy",), "ill": ("ill",)},
    span=None,
    sites=0,
)
"""Columns and classes of the made-up examples."""
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
SUFFIX = ".jinja"
RENAMED = {"gitignore": ".gitignore"}


def write_package(
    kind: str, name: str, source: str, folder: Path, table: Guess | None = None, framework: str = "keras"
) -> Path:
    """Write a package that can be installed and run unchanged.

    Args:
        kind: task, strategy or mechanism.
        name: of the plugin in Cloister.
        source: data format of a task: csv, npz or images.
        folder: of the package; it must not exist.
        table: what a task's own tables hold, for csv; None: made-up examples are written.
        framework: of a task's model: keras, torch or numpy.

    Returns:
        The folder.

    Raises:
        ConfigError: an argument is not valid, or the folder exists or cannot be written.
    """
    if kind not in GROUPS:
        raise ConfigError(f"{kind!r} cannot be made; valid: {', '.join(GROUPS)}")
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"the name {name!r} is not valid: small letters, digits and '-', such as chest-scans")
    if source not in ENDINGS:
        raise ConfigError(f"--from {source!r} is not valid: it must be {', '.join(ENDINGS)}")
    if framework not in FRAMEWORKS:
        raise ConfigError(f"--framework {framework!r} is not valid: it must be {', '.join(FRAMEWORKS)}")
    module = name.replace("-", "_")
    groups = {"group": table.patient} if table and table.patient else {}
    own, size = ("FILE", "N") if table else (f"site-a{ENDINGS[source]}", SITES["site-a"])
    facts = {
        "kind": kind,
        "name": name,
        "module": module,
        "klass": "".join(part.capitalize() for part in name.split("-")),
        "points": GROUPS[kind],
        "source": source,
        "framework": framework,
        "packages": FRAMEWORKS[framework] if kind == "task" else (),
        "ending": ENDINGS[source],
        "what": "folder" if source == "images" else "file",
        "table": table or MADE_UP,
        "is_made_up": table is None,
        "clients": f"--clients {table.sites} " if table and table.sites else "",
        # Commands are pasted into a shell.
        "group": _quoted(f"task.{as_pairs(groups)}") if groups else "",
        "node": _quoted(f"data-path='{own}' public-size={size} {as_pairs(groups)}".strip()),
    }
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} is there already; name another folder with --to") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None
    try:
        for part in ("common", kind, *([source] if kind == "task" else [])):
            _render(part, facts, folder)
        if kind == "task" and table is None:
            write_examples(source, folder / module / "data", folder)
    except OSError as error:
        rmtree(folder, ignore_errors=True)  # an incomplete package is useless
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None
    return folder


def _quoted(setting: str) -> str:
    """Return a setting as one word of the shell, in the plainest quotes."""
    return shlex.quote(setting) if set(setting) & set('"$`\\!') else f'"{setting}"'


def _render(part: str, facts: Mapping[str, object], folder: Path) -> None:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cloister.scaffold"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    environment.filters["code"] = lambda text: json.dumps(text, ensure_ascii=False)  # any text, as a string of Python
    for path, template in _templates(files("cloister.scaffold").joinpath("templates", part)):
        place = folder / path.with_name(RENAMED.get(path.name, path.name)).as_posix().replace(
            "MODULE", str(facts["module"])
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(environment.from_string(template).render(facts), encoding="utf-8")


def _templates(folder: Traversable, above: Path = Path()) -> Iterator[tuple[Path, str]]:
    """Yield the relative path of every template below a folder, and its text."""
    for item in folder.iterdir():
        if item.is_dir():
            yield from _templates(item, above / item.name)
        elif item.name.endswith(SUFFIX):
            yield above / item.name.removesuffix(SUFFIX), item.read_text(encoding="utf-8")


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
