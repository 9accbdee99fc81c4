"""The folder of all kits: files are whole or absent, secrets are for their owner alone, and one writes at a time."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cloister.core.errors import ConfigError
from cloister.core.files import atomic_path

SECRET, PUBLIC, SCRIPT, FOLDER = 0o600, 0o644, 0o755, 0o700
CHECKSUMS = "SHA256SUMS"
ROSTER_KEY = "roster/roster.key"
"""The private key of whoever signs rosters; in no kit."""
HEART = {"server": "server/server.key", "operator": "operator/credentials.yaml", "roster": ROSTER_KEY}
"""Without which a kit is not there, whatever else lies in its folder."""
ISSUED = "issued.json"
"""Member -> public key of its node, or `signing/NAME` -> public signing key of a site, empty once it was taken off the
roster; again as `signing-key-of-its-own/NAME` if the site made it; empty for the server, the operator and the key of
rosters."""


@dataclass
class Kits:
    """The folder of all kits while they are written.

    Args:
        folder: absolute.
        written: files, relative to it.
        notes: what is left for a person to do.
        issued: what was ever made, as `issued.json` has it.
    """

    folder: Path
    written: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    issued: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Where a file lies, by its name relative to the folder."""
        return self.folder / name

    def read(self, name: str) -> bytes:
        """What is in a file."""
        return self.path(name).read_bytes()

    def has(self, name: str) -> bool:
        """Whether a file is there.

        Raises:
            ConfigError: something else is in its place.
        """
        path = self.path(name)
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is in the place of a file of the kit: move it away")
        return path.is_file()

    def is_gone(self, member: str) -> bool:
        """Whether a member's kit was made once and is no longer here, which is noted."""
        gone = member in self.issued and not self.has(HEART[member])
        if gone:
            self.notes.append(f"{member} was made before and is not here: it is not made again (--remake {member})")
        return gone

    def write(self, name: str, content: bytes | str, mode: int) -> None:
        """Write a file whole, in folders that nobody else can look into.

        Args:
            name: relative to the folder of all kits.
            content: of the file.
            mode: of the file, whatever the umask.

        Raises:
            ConfigError: it cannot be written.
        """
        path = self.path(name)
        try:
            self._make_folders(path)
            self._break_seal(name)
            with (
                atomic_path(path) as partial,
                open(partial, "xb", opener=lambda file, flags: os.open(file, flags, mode)) as file,
            ):
                os.fchmod(file.fileno(), mode)  # whatever the umask
                file.write(content if isinstance(content, bytes) else content.encode())
        except OSError as error:
            # Without the cause, whose frames hold what was to be written.
            raise ConfigError(f"{error.filename or path}: {error.strerror}; the kits are not complete") from None
        self.written.append(name)

    def read_issued(self) -> dict[str, str]:
        """What was ever made.

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
        """Note what was ever made, if that is not what the record says."""
        if not self.has(ISSUED) or issued != self.read_issued():
            self.write(ISSUED, json.dumps(issued, indent=2) + "\n", PUBLIC)

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """The block, with the folder to itself: whoever changes kits at the same time waits until it ends.

        Args:
            waiting: is called once if somebody else has to finish first.

        Raises:
            ConfigError: the folder cannot be made or locked.
        """
        try:
            self.folder.mkdir(mode=FOLDER, parents=True, exist_ok=True)
            # The folder itself, which may be read-only: a lock ends with the process that has it.
            handle = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{self.folder}: {error.strerror}; the kits are not complete") from None
        try:
            _lock(handle, self.folder, waiting)
            yield
        finally:
            os.close(handle)

    def sum_up(self, member: str) -> None:
        """List the checksums of a kit that changed, so that whoever receives it can tell that it is whole."""
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

    def _make_folders(self, path: Path) -> None:
        inside = [parent for parent in path.parents if self.folder in parent.parents]
        for folder in (self.folder, *reversed(inside)):
            folder.mkdir(mode=FOLDER, parents=True, exist_ok=True)
            folder.chmod(FOLDER)  # also one that somebody else has made

    def _break_seal(self, name: str) -> None:
        """Take the checksums out of a kit that is about to change."""
        for parent in Path(name).parents:
            if Path(name).name != CHECKSUMS and str(parent) != ".":
                (self.folder / parent / CHECKSUMS).unlink(missing_ok=True)

    def add(self, name: str, content: bytes | str, mode: int) -> None:
        """Write a file that is not there yet.

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


def _lock(handle: int, folder: Path, waiting: Callable[[], None]) -> None:
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be locked: {error.strerror}") from None
