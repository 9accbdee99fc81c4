"""Reduction of exceptions to one line with type and place, without the values that they are about.

The text of a third-party exception may quote an example, and so may the variables of a frame. Neither is ever printed,
logged or written. Only the exception's type and the lines of code that led to it are kept.
"""

import errno
import os
import signal
import site
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

from cloister.utils.errors import CloisterError

LINES, WIDTH = 5, 600
"""Most lines of a displayed error, and most characters of each: enough for the longest remedies."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a reached quota or a reached file size limit."""
INTERRUPTED = 130
"""Exit code of an interrupted command."""
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}
)
_folders: ContextVar[list[tuple[Path, bool]] | None] = ContextVar(
    "folders for tracebacks, of the block of one_line", default=None
)

AGAIN_SECONDS = 0.05
"""Time from an ignored KeyboardInterrupt to its repetition."""
_interrupts: list[int] = []


def hear_interrupts() -> None:
    """Record each SIGINT of this process, and raise KeyboardInterrupt as Python does.

    Python ignores an exception in a callback of an import or of its garbage collector. It is then raised once more,
    soon after.
    """
    earlier = sys.unraisablehook

    def hear(number: int, _: FrameType | None) -> None:
        _interrupts.append(number)
        raise KeyboardInterrupt

    def again(ignored: "sys.UnraisableHookArgs") -> None:
        if ignored.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            earlier(ignored)

    sys.unraisablehook = again
    signal.signal(signal.SIGINT, hear)
    signal.signal(signal.SIGALRM, hear)


def is_interrupted() -> bool:
    """Return whether a SIGINT was recorded.

    A library that is interrupted during its import may raise an error of its own in place of KeyboardInterrupt.
    """
    return bool(_interrupts)


class Crash(Exception):
    """A one-line replacement of another exception, without a traceback.

    Loggers read an exception's `__traceback__`, which is None here. So Flower, which logs exceptions of a ServerApp,
    prints the line alone.

    Attributes:
        cause: the original exception.
    """

    __traceback__ = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]

    def __init__(self, line: str, cause: Exception) -> None:
        super().__init__(line)
        self.cause = cause


@contextmanager
def one_line(unchanged: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Replace every exception of the block by one of a single line.

    Requests to end the process pass through.

    Args:
        unchanged: exceptions that pass through too.

    Raises:
        Crash: in place of any other `Exception`. The traceback of a third-party exception has been written to a file.
        KeyboardInterrupt: in place of an `Exception` after a recorded SIGINT.
    """
    token = _folders.set([])
    try:
        yield
    except unchanged:
        raise
    except Exception as error:
        if is_interrupted():
            raise KeyboardInterrupt from None
        raise Crash(shortened(told(error)), error) from None
    finally:
        _folders.reset(token)


def write_traces_to(folder: Path, coarse: bool = False) -> None:
    """Set the folder of tracebacks until the block of `one_line` ends.

    Outside such a block it does nothing.

    Args:
        folder: for tracebacks.
        coarse: True if their names may reveal only the day.
    """
    folders = _folders.get()
    if folders is not None:
        folders.append((folder, coarse))


def told(error: BaseException) -> str:
    """Describe an exception in one line.

    Cloister's own errors appear with their text, a full disk as such, any other exception by type and place.

    An error of the operating system includes the path that it is about. The traceback of any other exception is written
    to a file, which the line names.
    """
    if isinstance(error, CloisterError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in FULL:
        at = f": {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno)}{at}; make room, and begin again"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename2 or error.filename}: {error.strerror}"  # of a renaming, the place that is meant
    what, trace = f"{kind(error)} at {place(error)}", trace_without_values(error)
    places: list[tuple[Path | None, bool]] = [*reversed(_folders.get() or []), (None, False)]
    for parent, coarse in places:
        with suppress(OSError):
            name = time.strftime("traceback-%Y%m%d-" if coarse else "traceback-%Y%m%d-%H%M%S-", time.gmtime())
            handle, path = tempfile.mkstemp(".txt", name if parent else f"cloister-{name}", parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(trace)
            return f"{what}; the traceback, without any values, is in {path}"
    return f"{what}; its traceback could be written nowhere"


def shortened(text: str) -> str:
    """Shorten a text to `LINES` lines of `WIDTH` characters."""
    lines, end = text.splitlines(), WIDTH // 2
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... and {len(lines) - LINES + 1} more like these"]
    # The beginning of a line names the key, and its end names the remedy: the middle is cut out.
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - end - 5]} ... {line[-end:]}" for line in lines)


def place(error: BaseException) -> str:
    """Return `file:line` of the last frame in the user's code, or else of the last frame."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [
        (path, line)
        for path, line in frames
        if not path.startswith("<") and not any(Path(path).is_relative_to(each) for each in (_PACKAGE, *_LIBRARIES))
    ]
    return "an unknown place" if not frames else "{}:{}".format(*(own or frames)[-1])


def trace_without_values(error: BaseException) -> str:
    """Format the traceback of an exception and its causes, without values.

    It contains lines of code, types, and the text of Cloister's own errors. It omits variables and the texts of other
    exceptions: both may contain examples.
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
    """Return the type of an exception.

    A NameError includes the undefined name if the code contains it.
    """
    of = type(error)
    told = of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"
    name = error.name if isinstance(error, NameError) else None
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    # A name that no code contains was made from a value, which may belong to an example.
    return f"{told} of {name!r}" if name and any(name in code.co_names for code in codes) else told
