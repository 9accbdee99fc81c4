"""Reduction of exceptions to one line with type and place, without the values that they are about.

The text of a third-party exception may quote an example, and so may the variables of a frame. Neither is logged or
written. Only the exception's type and the lines of code that led to it are kept.

In a check, a plan or a simulation one user has server, clients and data (`for_owner`). The terminal of this user shows
the text of an exception too. Replies, run directories and traceback files still never contain it.
"""

import errno
import os
import re
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
from dataclasses import dataclass, field
from pathlib import Path

from cloister.utils.errors import CloisterError, DataError
from cloister.utils.text import clean

LINES, WIDTH = 5, 600
"""Most lines of a displayed error, and most characters of each: enough for the longest remedies."""
WORDS = 240
"""Largest number of characters quoted from the text of a third-party exception."""
WITHHELD = "details are in the log of the node"
"""Text of an error reply in place of the text of an exception."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a reached quota or a reached file size limit."""
INTERRUPTED = 130
"""Exit code of an interrupted command."""
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LIST, _NUMBER = re.compile(r"\[[^\[\]]*\]"), re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan\b|inf\b)")
_NESTED = re.compile(r"\[(?:[\s.,]|\\n)*\]|array\(\s*\.\.\.(?:[^()]|\([^()]*\))*\)")
EXTRA_OF = {"tensorflow": "keras", "keras": "keras", "h5py": "keras", "torch": "torch", "safetensors": "torch"}
"""Package of a framework -> the extra of Cloister that installs it."""
SHAPE = 4
"""Largest number of whole numbers in brackets that count as a shape, and not as an array."""


@dataclass(frozen=True)
class Failure:
    """Exception of a client in this process.

    Attributes:
        error: name of its type.
        text: for the owner of the data.
        is_foreseen: whether it is one of Cloister's own.
    """

    error: str
    text: str
    is_foreseen: bool


@dataclass
class _Reader:
    """Reader of the messages of a block.

    Attributes:
        folders: for tracebacks.
        is_owner: whether this user has all data that the block reads.
        wants_all: whether whole tracebacks are printed.
        failures: of clients in the innermost block of `for_owner`, equal ones once.
    """

    folders: list[Path] = field(default_factory=list)
    is_owner: bool = False
    wants_all: bool = False
    failures: list[Failure] = field(default_factory=list)


_reader: ContextVar[_Reader | None] = ContextVar("reader of messages about exceptions", default=None)

AGAIN_SECONDS = 0.05
"""Time from an ignored KeyboardInterrupt to its repetition."""
interrupts: list[int] = []
"""Signals that `record_interrupts` recorded: an interrupted library may raise an error of its own in their place."""


def record_interrupts() -> None:
    """Record each SIGINT, and raise KeyboardInterrupt: again if Python ignores it, as in a callback of an import."""
    earlier = sys.unraisablehook

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    def repeat(ignored: "sys.UnraisableHookArgs") -> None:
        if ignored.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            earlier(ignored)

    sys.unraisablehook = repeat
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, interrupt)


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
    token = _reader.set(_Reader())
    try:
        yield
    except unchanged:
        raise
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from None
        show_trace(error)
        raise Crash(shortened(described(error)), error) from None
    finally:
        _reader.reset(token)


@contextmanager
def for_owner(wants_all: bool = False) -> Iterator[list[Failure]]:
    """Show the texts of exceptions on the terminal, as its user has all data that the block reads.

    Within a block of `one_line`, this lasts until that block ends, so that its line has the text.

    Args:
        wants_all: whether to print whole tracebacks on standard error.

    Yields:
        The failures of clients in the block, equal ones once.
    """
    reader = _reader.get() or _Reader()
    reader.is_owner, reader.wants_all = True, reader.wants_all or wants_all
    token, outer = _reader.set(reader), reader.failures
    found: list[Failure] = []
    reader.failures = found
    try:
        yield found
    finally:
        outer += found
        reader.failures = outer
        _reader.reset(token)


def note_failure(error: Exception) -> str:
    """Return the text of a client's exception for the owner of all data, and keep it for the block of `for_owner`.

    Outside such a block, the text is empty.
    """
    reader = _reader.get()
    if reader is None or not reader.is_owner:
        return ""
    foreseen = isinstance(error, CloisterError)
    text = f"{type(error).__name__}: {error}" if foreseen else explained(error)
    if isinstance(error, DataError) and error.first:
        text += f"; {error.first}"
    failure = Failure(type(error).__name__, text, foreseen)
    if failure not in reader.failures:
        show_trace(error)
        reader.failures.append(failure)
    return text


def explained(error: BaseException, names_folders: bool = False) -> str:
    """Return the type and the place of an exception; within `for_owner`, its text too.

    Elsewhere the place is the file's name and the line: a node sends the texts of Cloister's own errors to the server.

    Args:
        error: to describe.
        names_folders: whether the place is a path elsewhere too: the text stays on this machine.
    """
    reader = _reader.get()
    if reader is None or not reader.is_owner:
        return f"{kind(error)} at {place(error) if names_folders else os.path.basename(place(error))}"
    text = quoted(error)
    return f"{kind(error)}: {text}, at {place(error)}" if text else f"{kind(error)} at {place(error)}"


def quoted(error: BaseException) -> str:
    """Return the text of an exception in one line of at most `WORDS` characters.

    It may quote an example, so only the owner of the data may see it. Arrays are replaced by dots.
    """
    text = str(error)
    if isinstance(error, SyntaxError):
        text = f"{error.msg}: {error.text}" if error.text else error.msg
    text = _LIST.sub(lambda found: found[0] if _is_shape(found[0]) else "...", _COLOURS.sub("", text))
    while (inner := _NESTED.sub("...", text)) != text:
        text = inner
    words = clean(" ".join(text.split()))
    return f"{words[:WORDS]} ..." if len(words) > WORDS else words


def _is_shape(text: str) -> bool:
    numbers = _NUMBER.findall(text)
    return len(numbers) <= SHAPE and all(number.isdecimal() for number in numbers)


def show_trace(error: BaseException) -> None:
    """Print the whole traceback on standard error, if the block of `for_owner` asks for it."""
    reader = _reader.get()
    if reader is not None and reader.wants_all:
        traceback.print_exception(error, file=sys.stderr)


def write_traces_to(folder: Path) -> None:
    """Set the folder of tracebacks until the block of `one_line` ends.

    Without such a block it has no effect.

    Args:
        folder: for tracebacks. Their names have the day alone, since logs quote them.
    """
    reader = _reader.get()
    if reader is not None:
        reader.folders.append(folder)


def described(error: BaseException) -> str:
    """Describe an exception in one line.

    Cloister's own errors appear with their text, a full disk as such, any other exception by type and place.

    An error of the operating system includes the path that it is about. The traceback of any other exception is written
    to a file, which the line names.
    """
    if isinstance(error, CloisterError):
        return f"{type(error).__name__}: {error}"
    if missing := missing_extra(error):
        return missing
    if isinstance(error, OSError) and error.errno in FULL:
        at = f": {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno)}{at}; make room, and begin again"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename2 or error.filename}: {error.strerror}"  # of a renaming, the place that is meant
    what, trace, reader = explained(error, names_folders=True), trace_without_values(error), _reader.get()
    name = time.strftime("traceback-%Y%m%d-", time.gmtime())
    for parent in (*reversed(reader.folders if reader else []), None):
        with suppress(OSError):
            handle, path = tempfile.mkstemp(".txt", name if parent else f"cloister-{name}", parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(trace)
            return f"{what}; the traceback, without any values, is in {path}"
    return f"{what}; its traceback could be written nowhere"


def missing_extra(error: BaseException) -> str:
    """Return the remedy for a framework that is not installed; empty for any other error."""
    package = error.name if isinstance(error, ModuleNotFoundError) else None
    extra = EXTRA_OF.get(package or "")
    return f"{package} is not installed here: pip install 'cloister-fl[{extra}]'" if extra else ""


def shortened(text: str) -> str:
    """Shorten a text to `LINES` lines of `WIDTH` characters."""
    lines, end = text.splitlines(), WIDTH // 2
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... and {len(lines) - LINES + 1} more like these"]
    # The beginning of a line names the key, and its end names the remedy: the middle is cut out.
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - end - 5]} ... {line[-end:]}" for line in lines)


def place(error: BaseException) -> str:
    """Return `file:line` of the last frame in the user's code, or else of the last frame.

    For a syntax error of a file, it is the place of that error.
    """
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{error.filename}:{error.lineno}"
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

    A NameError includes the undefined name, and an ImportError the module, if the code contains it.
    """
    of = type(error)
    name_of = of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"
    name = error.name if isinstance(error, NameError | ImportError) else None
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    # A name that no code contains was made from a value, which may belong to an example. `import a.b` contains "a.b".
    known = (f"{each}." for code in codes for each in code.co_names)
    return f"{name_of} of {name!r}" if name and any(each.startswith(f"{name}.") for each in known) else name_of
