"""Atomic writing and reading of files in run directories, and libraries that write to standard error."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.utils.errors import ConfigError

DAY = 86_400
"""Seconds."""
Json = Mapping[str, Any]
"""A table of a JSON file as it was read; its reader checks the values."""
JsonTable = dict[str, Any]
"""A table of JSON that its holder may change. Both aliases name JSON for the reader; nothing checks them."""


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` only if the block succeeds.

    The name keeps the suffix of `path`, from which some libraries derive a format. The data is on disk (fsync) before
    the file is renamed.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    partial.unlink(missing_ok=True)  # in a foreign folder this could be a link, which writing would follow
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_npz(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write named arrays to an `.npz` file, atomically."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        np.savez(file, allow_pickle=True, **arrays)


def read_npz(path: Path) -> dict[str, NDArray]:
    """Read the arrays of `write_npz`, without pickles.

    Raises:
        OSError: the file cannot be read.
        Exception: any other type for another kind of file, since readers of archives raise several types.
    """
    with np.load(path, allow_pickle=False) as saved:
        return dict(saved)


def complete_lines(path: Path) -> list[str]:
    """Return the complete lines of a file that a run appends to; none if there is no file.

    A killed run may leave a partial last line.
    """
    return path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []


def read_json(path: Path) -> JsonTable:
    """Read the table in a JSON file of a run directory.

    Raises:
        ConfigError: the file does not exist, or contains no table.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is no run directory: it has no {path.name}") from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent} is no run directory: it is a file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not what a run writes: it holds no table")
    return content


def expanded(path: str | Path) -> Path:
    """Expand `~` in a path to a home folder; keep that of an unknown user."""
    return Path(os.path.expanduser(path))


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Discard what the block writes to standard error, such as while TensorFlow is imported.

    TensorFlow's libraries print while they are loaded, before a setting takes effect.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        original = os.dup(2)
    except OSError:  # the process has no standard error
        yield
        return
    sys.stderr.flush()
    with open(os.devnull, "w") as discarded:
        os.dup2(discarded.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
