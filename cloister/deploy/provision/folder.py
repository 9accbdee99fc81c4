"""Folder of all kits: atomic files, secrets that only their owner can read, and one writer at a time."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cloister.utils.errors import ConfigError
from cloister.utils.files import atomic_path

SECRET, PUBLIC, SCRIPT, FOLDER = 0o600, 0o644, 0o755, 0o700
CHECKSUMS = "SHA256SUMS"
ROSTER_KEY = "roster/roster.key"
"""Private key that signs rosters. No kit contains it."""
HEART = {"server": "server/server.key", "operator": "operator/credentials.yaml", "roster": ROSTER_KEY}
"""File of each kit whose absence means that the kit is absent."""
ISSUED = "issued.json"
"""Record of all keys ever issued, by member: public key of its node, empty for the server, the operator and the key of
rosters. `signing/NAME` is the public signing key of a site, empty once it was taken off the roster. If the site made
that key, `signing-key-of-its-own/NAME` contains it too.
"""


@dataclass
class Kits:
    """Folder of all kits while they are written.

    Args:
        folder: absolute.
        written: files, relative to it.
        notes: tasks left for the operator.
        issued: all keys ever issued, as in `issued.json`.
    """

    folder: Path
    written: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    issued: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return the path of a file, given its name relative to the folder."""
        return self.folder / name

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        return self.path(name).read_bytes()

    def has(self, name: str) -> bool:
        """Return whether a file exists.

        Raises:
            ConfigError: something other than a file is in its place.
        """
        path = self.path(name)
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is in the place of a file of the kit: move it away")
        return path.is_file()

    def is_gone(self, member: str) -> bool:
        """Return whether a member's kit was made once and is absent now.

        If so, add a note.
        """
        gone = member in self.issued and not self.has(HEART[member])
        if gone:
            self.notes.append(f"{member} was made before and is not here: it is not made again (--remake {member})")
        return gone

    def write(self, name: str, content: bytes | str, mode: int) -> None:
        """Write a file atomically, in folders that only their owner can read.

        Args:
            name: relative to the folder of all kits.
            content: of the file.
            mode: of the file, independent of the umask.

        Raises:
            ConfigError: it cannot be written.
        """
        path = self.path(name)
        try:
            inside = [parent for parent in path.parents if self.folder in parent.parents]
            for folder in (self.folder, *reversed(inside)):
                folder.mkdir(mode=FOLDER, parents=True, exist_ok=True)
                folder.chmod(FOLDER)  # also an existing folder
            for parent in Path(name).parents:  # a kit that is about to change has no checksums
                if Path(name).name != CHECKSUMS and str(parent) != ".":
                    (self.folder / parent / CHECKSUMS).unlink(missing_ok=True)
            with (
                atomic_path(path) as partial,
                open(partial, "xb", opener=lambda file, flags: os.open(file, flags, mode)) as file,
            ):
                os.fchmod(file.fileno(), mode)  # override the umask
                file.write(content if isinstance(content, bytes) else content.encode())
        except OSError as error:
            # Not chained: the frames of the cause contain the content, which may be secret.
            raise ConfigError(f"{error.filename or path}: {error.strerror}; the kits are not complete") from None
        self.written.append(name)

    def read_issued(self) -> dict[str, str]:
        """Return the record of all keys ever issued.

        Raises:
            ConfigError: the record cannot be read.
        """
        try:
            found = json.loads(self.read(ISSUED))
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found.values()):
            raise ConfigError(f"{self.path(ISSUED)} is no record of issued kits")
        return found

    def write_issued(self, issued: dict[str, str]) -> None:
        """Write the record of all keys ever issued, if it has changed."""
        if not self.has(ISSUED) or issued != self.read_issued():
            self.write(ISSUED, json.dumps(issued, indent=2) + "\n", PUBLIC)

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of the folder during the block.

        Other processes that change kits wait for its end.

        Args:
            waiting: called once if another process holds the lock.

        Raises:
            ConfigError: the folder cannot be made or locked.
        """
        try:
            self.folder.mkdir(mode=FOLDER, parents=True, exist_ok=True)
            # Lock the folder itself, which may be read-only. The lock ends with the process.
            handle = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{self.folder}: {error.strerror}; the kits are not complete") from None
        try:
            try:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    waiting()
                    fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:
                raise ConfigError(f"{self.folder} cannot be locked: {error.strerror}") from None
            yield
        finally:
            os.close(handle)

    def sum_up(self, member: str) -> None:
        """Write the checksums of a changed kit.

        With them its recipient can verify that it is complete.
        """
        home = self.path(member)
        if not home.is_dir() or self.has(f"{member}/{CHECKSUMS}"):
            return
        files = sorted(path for path in [*home.glob("*"), *home.glob("nodes/*.pub")] if path.is_file())
        lines = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(home).as_posix()}\n"
            for path in files
            if path.name != CHECKSUMS
        ]
        self.write(f"{member}/{CHECKSUMS}", "".join(lines), PUBLIC)

    def add(self, name: str, content: bytes | str, mode: int) -> None:
        """Write a file that does not exist yet.

        Args: as `write`.
        """
        if not self.has(name):
            self.write(name, content, mode)

    def add_text(self, name: str, content: str, mode: int) -> None:
        """Write a script or a configuration that is not there yet; note it where another one is there.

        Args: as `write`.
        """
        self.add(name, content, mode)
        if self.read(name) != content.encode():
            self.notes.append(f"{name} differs from what federation.toml describes; remove it to have it written anew")
