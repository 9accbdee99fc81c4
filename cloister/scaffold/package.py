"""Packages from templates: every file rendered, with synthetic data for a task."""

import keyword
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from shutil import rmtree

from cloister.core.errors import ConfigError
from cloister.scaffold.example_data import ENDINGS, write_examples

GROUPS = {"task": "tasks", "strategy": "strategies", "mechanism": "mechanisms"}
"""Kind of package -> its group of entry points."""
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
SUFFIX = ".jinja"
RENAMED = {"gitignore": ".gitignore"}


def write_package(kind: str, name: str, source: str, folder: Path) -> Path:
    """Write a package that can be installed and run unchanged.

    Args:
        kind: task, strategy or mechanism.
        name: of the plugin in Cloister.
        source: data format of a task: csv, npz or images.
        folder: of the package; it must not exist.

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
    module = name.replace("-", "_")
    facts = {
        "kind": kind,
        "name": name,
        "module": module,
        "klass": "".join(part.capitalize() for part in name.split("-")),
        "group": GROUPS[kind],
        "ending": ENDINGS[source],
        "what": "folder" if source == "images" else "file",
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
        if kind == "task":
            write_examples(source, folder / module / "data", folder)
    except OSError as error:
        rmtree(folder, ignore_errors=True)  # an incomplete package is useless
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None
    return folder


def _render(part: str, facts: Mapping[str, str], folder: Path) -> None:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, autoescape=False)
    for path, template in _templates(files("cloister.scaffold").joinpath("templates", part)):
        place = folder / path.with_name(RENAMED.get(path.name, path.name)).as_posix().replace("MODULE", facts["module"])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(environment.from_string(template).render(facts), encoding="utf-8")


def _templates(folder: Traversable, above: Path = Path()) -> Iterator[tuple[Path, str]]:
    """Yield the relative path of every template below a folder, and its text."""
    for item in folder.iterdir():
        if item.is_dir():
            yield from _templates(item, above / item.name)
        elif item.name.endswith(SUFFIX):
            yield above / item.name.removesuffix(SUFFIX), item.read_text(encoding="utf-8")
