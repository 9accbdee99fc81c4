"""Files that are whole or absent, whatever happens while they are written."""

import errno
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError

DAY = 86_400
"""Seconds."""
LARGEST_TEXT = 1 << 28
"""Bytes of a text file in a run directory."""


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` only when the block ends well.

    The name keeps the suffix of `path`, by which some libraries choose a format. What was written is on disk (fsync)
    before the name changes hands.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    partial.unlink(missing_ok=True)  # in a folder of somebody else's a link may wait there, and would be followed
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


def read_npz(path: Path) -> dict[str, NDArray]:
    """The arrays in an `.npz` file that `write_npz` wrote, without pickles and in no more memory than the file takes.

    Raises:
        OSError: the file cannot be read.
        Exception: of many kinds, where it is another file: what reads archives has no kind of its own.
    """
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
            raise ValueError("the arrays are larger than the file, and no run compresses them")
    with np.load(path, allow_pickle=False) as saved:
        return dict(saved)


def read_text(path: Path) -> str:
    """The text in a file of a run directory, which somebody else may have made.

    Raises:
        OSError: it is no file (reading a pipe would not return, and a device may have no end), or a very large one.
        ValueError: it holds no text.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if found.st_size > LARGEST_TEXT:
        raise OSError(errno.EFBIG, f"it is larger than {LARGEST_TEXT >> 20} MB", str(path))
    return path.read_text()


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file of a run directory.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(read_text(path))
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
