"""Files that are whole or absent, whatever happens while they are written."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError

DAY = 86_400
"""Seconds."""


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` only when the block ends well.

    The name keeps the suffix of `path`, by which some libraries choose a format. What was written is on disk (fsync)
    before the name changes hands.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_npz(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write named arrays to an `.npz` file, whole or not at all."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        np.savez(file, allow_pickle=True, **arrays)


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file of a run directory.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is no run directory: it has no {path.name}") from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent} is no run directory: it is a file") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not what a run writes: it holds no table")
    return content


def expanded(path: str | Path) -> Path:
    """A path whose `~` is somebody's home folder. One of a user whom this machine does not know stays as it is."""
    return Path(os.path.expanduser(path))


def coarse_mtime(path: Path) -> None:
    """Let a file say on which day (UTC) it was changed, and not when: the time may be somebody's secret."""
    day = path.stat().st_mtime // DAY * DAY
    os.utime(path, (day, day))


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
