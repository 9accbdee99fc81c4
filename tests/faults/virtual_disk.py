"""A disk that fails on purpose: it dies, loses its power or refuses at a chosen effect.

Effects on files under one folder are counted: opening for writing, a write, a sync, a change of name, a removal, a new
folder. At most one fault is set for each of them.

    kill     the process ends: files are what the kernel has; what Python still buffers is lost
    power    the machine ends: of a file stays what was synced and some of the rest, and of names in a folder that was
             not synced each as it is or as it was
    ENOSPC, EIO, EDQUOT   the call fails; half of a write is in the file
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

KILL, POWER = "kill", "power"
ERRORS = ("ENOSPC", "EIO", "EDQUOT")
FAULTS = (KILL, POWER, *ERRORS)
UNTOUCHED = ".reserve"
"""Megabytes of nothing, which a copy can do without."""


class Killed(BaseException):
    """The process is dead. Nothing that it still does while it is unwound has an effect."""


class Disk:
    """A folder whose effects are counted, and fail as planned. It outlives the processes that write to it.

    Args:
        folder: on a real disk.
        rng: decides what a loss of power takes.

    Attributes:
        effects: of this process so far.
        struck: the faults that happened.
        is_dead: whether the process is.
    """

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.effects = 0
        self.struck: list[str] = []
        self.is_dead = False
        self._faults: Mapping[int, str] = {}
        self._synced: dict[Path, int] = {}
        self._before: dict[Path, bytes | None] = {}

    def effect(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        """Something is about to be done that lasts, and that may fail.

        Args:
            name: of it.
            half: does a part of it.
        """
        if self.is_dead:
            raise Killed
        self.effects += 1
        if (fault := self._faults.get(self.effects)) is None:
            return
        self.struck.append(f"{fault} at {name}")
        if fault in ERRORS:
            half()
            code = getattr(errno, fault)
            raise OSError(code, os.strerror(code))
        if self.rng.random() < 0.5:
            half()
        self._die(fault)

    def _die(self, fault: str) -> None:
        """Keep what the disk has now: unwinding closes files, which writes what a dead process would not."""
        self.is_dead = True
        shutil.copytree(self.folder, self._kept, ignore=shutil.ignore_patterns(UNTOUCHED))
        if fault == POWER:
            self._lose_power()
        raise Killed

    def _lose_power(self) -> None:
        for path in [path for path in self.folder.rglob("*") if path.is_file() and path.name != UNTOUCHED]:
            size = path.stat().st_size
            os.truncate(self._copy_of(path), self.rng.randint(min(self._synced.get(path, 0), size), size))
        for path, content in self._before.items():
            if self.rng.random() < 0.5 and path.parent.exists():
                copy = self._copy_of(path)
                copy.unlink(missing_ok=True) if content is None else copy.write_bytes(content)
        self._before.clear()
        copies = (path for path in self._kept.rglob("*") if path.is_file())
        self._synced = {self.folder / path.relative_to(self._kept): path.stat().st_size for path in copies}

    @property
    def _kept(self) -> Path:
        return self.folder.with_name(self.folder.name + ".kept")

    def _copy_of(self, path: Path) -> Path:
        return self._kept / path.relative_to(self.folder)

    def reboot(self) -> None:
        """Put in place what was left when it died."""
        if self._kept.exists():
            shutil.rmtree(self.folder)
            self._kept.rename(self.folder)

    @contextmanager
    def watched(self, faults: Mapping[int, str]) -> Iterator["Disk"]:
        """The block, in which a process lives, and effects are counted.

        Args:
            faults: by the number of the effect, from 1 on.
        """
        self._faults, self.effects, self.is_dead = faults, 0, False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", self._replace(os.replace))
            patch.setattr(os, "fsync", self._fsync(os.fsync))
            patch.setattr(os, "unlink", self._unlink(os.unlink))
            patch.setattr(os, "mkdir", self._mkdir(os.mkdir))
            patch.setattr(Path, "open", self._open(Path.open))
            yield self

    def _holds(self, path: object) -> bool:
        return str(path).startswith(f"{self.folder}{os.sep}")

    def _remember(self, path: Path) -> None:
        """Return the content under this name at the last sync of its folder."""
        if path.name != UNTOUCHED and path not in self._before:
            self._before[path] = path.read_bytes() if path.exists() else None

    def _replace(self, real):
        def replace(source, target):
            self.effect("a change of name")
            self._remember(Path(source))
            self._remember(Path(target))
            real(source, target)
            self._synced[Path(target)] = self._synced.pop(Path(source), 0)

        return replace

    def _fsync(self, real):
        def fsync(handle):
            path = os.readlink(f"/proc/self/fd/{handle}")
            if not self._holds(path) and path != str(self.folder):
                return
            self.effect("a sync")
            self._synced[Path(path)] = os.fstat(handle).st_size
            for name in [name for name in self._before if str(name.parent) == path]:
                del self._before[name]

        return fsync

    def _unlink(self, real):
        def unlink(path, **options):
            if self._holds(path):
                self.effect("a removal")
                self._remember(Path(path))
                self._synced.pop(Path(path), None)
            real(path, **options)

        return unlink

    def _mkdir(self, real):
        def mkdir(path, *arguments, **options):
            if self._holds(path):
                self.effect("a new folder")
            real(path, *arguments, **options)

        return mkdir

    def _open(self, real):
        def opened(path, mode="r", *arguments, **options):
            if not self._holds(path) or not set(mode) & set("wax"):
                return real(path, mode, *arguments, **options)
            self.effect("an opening")
            if not path.exists():
                self._remember(path)
            if "a" not in mode:
                self._synced[path] = 0
            return Written(real(path, mode, *arguments, **options), self)

        return opened


class Written:
    """A file whose writes are effects."""

    def __init__(self, file, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data):
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        if self._disk.is_dead:  # an archive that is closed while the dead process is unwound
            return len(data)
        self._disk.effect("a write", half)
        return self._file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __iter__(self):
        return iter(self._file)

    def __getattr__(self, name):
        return getattr(self._file, name)
