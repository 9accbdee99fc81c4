"""What is told of an exception: one line, the place in the code, and nothing of the values it was about.

The text of an exception that is not ours may quote an example, and so may the variables of a frame. Neither is ever
printed, logged or written: what is kept of such an exception is its type and the lines of code that led to it.
"""

import errno
import os
import site
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from cloister.core.errors import CloisterError
from cloister.core.files import coarse_mtime

LINES, WIDTH = 5, 600
"""What is shown of an error at most; its longest remedies have room."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a limit that leaves no room for what is written."""
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}
)
_folders: ContextVar[list[tuple[Path, bool]] | None] = ContextVar(
    "folders for tracebacks, of the block of one_line", default=None
)


class Crash(Exception):
    """One line that stands for another exception, and brings no traceback along.

    Whoever logs an exception asks it for its `__traceback__`; this one has none to give, so that Flower, which logs
    what a ServerApp raises, prints the line alone.

    Attributes:
        cause: the exception it stands for.
    """

    __traceback__ = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]

    def __init__(self, line: str, cause: Exception) -> None:
        super().__init__(line)
        self.cause = cause


@contextmanager
def one_line(unchanged: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """The block, in which every exception becomes one line. What ends a process on request passes through.

    Args:
        unchanged: exceptions that pass through too.

    Raises:
        Crash: in place of any other `Exception`; the traceback of one that is not ours has been written to a file.
    """
    token = _folders.set([])
    try:
        yield
    except unchanged:
        raise
    except Exception as error:
        raise Crash(shortened(told(error)), error) from None
    finally:
        _folders.reset(token)


def write_traces_to(folder: Path, coarse: bool = False) -> None:
    """From here on, to the end of the block of `one_line`, tracebacks are written to this folder; outside, nothing.

    Args:
        folder: for them.
        coarse: whether their names and times are to tell no more than the day.
    """
    folders = _folders.get()
    if folders is not None:
        folders.append((folder, coarse))


def told(error: BaseException) -> str:
    """An exception in one line: ours as they are, a full disk as such, of any other its type and place.

    What the operating system refuses is told with the path that it is about. The traceback of any other is written to
    a file, which the line names.
    """
    if isinstance(error, CloisterError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in FULL:
        at = f": {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno)}{at}; make room, and begin again"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename2 or error.filename}: {error.strerror}"  # of a renaming, the place that is meant
    return f"{kind(error)} at {place(error)}; {_written(trace_without_values(error))}"


def shortened(text: str) -> str:
    """The beginning of a text that is longer than anybody reads: of its lines, and of each of them."""
    lines = text.splitlines()
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... and {len(lines) - LINES + 1} more like these"]
    return "\n".join(line if len(line) <= WIDTH else _without_middle(line) for line in lines)


def _without_middle(line: str) -> str:
    """A line without what stands between its beginning, which names the key, and its end, which names the remedy."""
    end = WIDTH // 2
    return f"{line[: WIDTH - end - 5]} ... {line[-end:]}"


def place(error: BaseException) -> str:
    """`file:line` of the last frame in the user's own code; if there is none, of the last one of all."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [found for found in frames if not _is_library(found[0])]
    return "an unknown place" if not frames else "{}:{}".format(*(own or frames)[-1])


def trace_without_values(error: BaseException) -> str:
    """The traceback of an exception and of those it came from: lines of code and types; of our own errors their text.

    Neither variables nor the texts of other exceptions are in it: both may hold examples.
    """
    blocks, seen = [], set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        frames = traceback.extract_tb(at.__traceback__)
        text = f": {at}" if isinstance(at, CloisterError) else ""
        blocks.append(f"Traceback (most recent call last):\n{''.join(frames.format())}{kind(at)}{text}\n")
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\nwhich led to:\n\n".join(reversed(blocks))


def kind(error: BaseException) -> str:
    """The type of an exception, and the name that is not defined, if it stands in the code."""
    of = type(error)
    told = of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"
    name = error.name if isinstance(error, NameError) else None
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    # One that stands in no code was made of a value, which may be an example's.
    return f"{told} of {name!r}" if name and any(name in code.co_names for code in codes) else told


def _is_library(path: str) -> bool:
    return path.startswith("<") or any(Path(path).is_relative_to(folder) for folder in (_PACKAGE, *_LIBRARIES))


def _written(trace: str) -> str:
    """Write a traceback; where it is, or that there is none."""
    places: list[tuple[Path | None, bool]] = [*reversed(_folders.get() or []), (None, False)]
    for parent, coarse in places:
        with suppress(OSError):
            name = time.strftime("traceback-%Y%m%d-" if coarse else "traceback-%Y%m%d-%H%M%S-", time.gmtime())
            handle, path = tempfile.mkstemp(".txt", name if parent else f"cloister-{name}", parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(trace)
            if coarse and parent is not None:
                coarse_mtime(Path(path))
                coarse_mtime(parent)
            return f"the traceback, without any values, is in {path}"
    return "its traceback could be written nowhere"
