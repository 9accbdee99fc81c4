"""Storage of attempts for a node with one process for each message, as files in a folder in memory."""

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cloister.client.attempts import NO_ROUND, AttemptStore
from cloister.core.errors import NodeConfigError, ProtocolError
from cloister.core.files import DAY, expanded

IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems in memory."""
MOUNTS = Path("/proc/self/mountinfo")
DIGITS = 20
"""Digits of the number of a round in a file."""
OWN = stat.S_IRUSR | stat.S_IWUSR
SUFFIX, ROUND = ".attempt", ".round"
MAXIMUM_ATTEMPTS = 64
"""Maximum attempts in a folder, at most one for a run; beyond it, the oldest is removed."""
MAXIMUM_WAIT = DAY
"""Maximum seconds that an attempt waits for its next step."""


class FolderStore(AttemptStore):
    """Store in files that only this user can read, in a folder of its own in memory.

    An unfinished attempt is removed after a day, or after many newer ones, and the node has then dropped out of that
    round. Refusing new attempts instead would exclude the node from all rounds after so many killed runs.

    Args:
        folder: its path.
    """

    def __init__(self, folder: str) -> None:
        self._path, self._folder = folder, -1

    def clear(self) -> None:
        """Remove all attempts and the numbers of rounds.

        Raises:
            NodeConfigError: the folder is unsuitable for secrets.
        """
        with self._alone():
            for name in os.listdir(self._folder):
                os.unlink(name, dir_fd=self._folder)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _files_of(self._path):
            self._folder = _opened(self._path)
            try:
                fcntl.flock(self._folder, fcntl.LOCK_EX)
                self._end_those_left(MAXIMUM_ATTEMPTS)
                yield
            finally:
                os.close(self._folder)

    def _end_those_left(self, max_attempts: int) -> None:
        """Remove attempts that waited too long, and those beyond `max_attempts`."""
        names = [name for name in os.listdir(self._folder) if name.endswith(SUFFIX)]
        since = {name: os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime for name in names}
        newest = sorted(names, key=since.__getitem__, reverse=True)
        for rank, name in enumerate(newest):
            if rank >= max_attempts or time.time() - since[name] > MAXIMUM_WAIT:
                os.unlink(name, dir_fd=self._folder)

    def _get(self, run: str) -> bytes:
        try:
            file = self._open(f"{run}{SUFFIX}", os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(file, "rb") as opened:
            return opened.read()

    def _put(self, run: str, attempt: bytes) -> None:
        name = f"{run}{SUFFIX}"
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)
        if attempt:
            self._end_those_left(MAXIMUM_ATTEMPTS - 1)
            file = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(file, "wb") as opened:
                opened.write(attempt)

    def _last(self, run: str) -> int:
        try:
            file = self._open(f"{run}{ROUND}", os.O_RDONLY)
        except FileNotFoundError:
            return NO_ROUND
        with os.fdopen(file, "rb") as opened:
            found = opened.read()
        if len(found) != DIGITS or not found.isdigit():
            raise ProtocolError("what is kept of the last round is no number; this node takes no part in the run")
        return int(found)

    def _note(self, run: str, number: int) -> None:
        file = self._open(f"{run}{ROUND}", os.O_WRONLY | os.O_CREAT)
        try:
            # The number has a fixed length, so that the file contains a valid number at all times.
            os.pwrite(file, b"%0*d" % (DIGITS, number), 0)
        finally:
            os.close(file)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, OWN, dir_fd=self._folder)


@contextmanager
def _files_of(path: str) -> Iterator[None]:
    """Convert errors of the operating system for the node's operator."""
    try:
        yield
    except OSError as error:
        raise NodeConfigError(f"secure-state {path}: {error.strerror}") from None


def _opened(path: str) -> int:
    """Open the folder and verify the opened one.

    Raises:
        NodeConfigError: another user can read or change its content, or it is on a disk.
    """
    folder = os.open(expanded(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
            raise NodeConfigError(f"secure-state {path} must belong to this user, with mode 0700: secrets lie in it")
        device, kind = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}", "a file system of unknown kind"
        for line in MOUNTS.read_text().splitlines():
            mount, _, system = line.partition(" - ")
            if mount.split()[2] == device:
                kind = system.split()[0]
                break
        if kind not in IN_MEMORY:
            raise NodeConfigError(f"secure-state {path} is on {kind}; it must be in memory: {' or '.join(IN_MEMORY)}")
    except BaseException:
        os.close(folder)
        raise
    return folder
