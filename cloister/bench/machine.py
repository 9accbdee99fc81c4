"""The machine that times were measured on, and how busy it was."""

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ALWAYS, IF_LOADED = ("cloister", "flwr", "numpy", "cryptography"), ("tensorflow", "keras", "numba")
"""Packages whose versions are named."""


@dataclass(frozen=True)
class Machine:
    """A machine, as it is at a moment.

    Attributes:
        processor: its name, as far as the system tells.
        cores: how many this process may use.
        memory: bytes; 0: the system does not tell.
        load: programs that ran or waited for a core in the last minute, on average; None: the system does not tell.
        versions: of Python and of packages.
    """

    processor: str
    cores: int
    memory: int
    load: float | None
    versions: dict[str, str]

    @classmethod
    def now(cls) -> "Machine":
        """This machine, at this moment."""
        return cls(_processor(), _cores(), _memory(), _load(), _versions())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _versions() -> dict[str, str]:
    packages = (*ALWAYS, *(name for name in IF_LOADED if name in sys.modules))
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    # The package tensorflow has several distributions, which all tell their version here.
    loaded = getattr(sys.modules.get(package), "__version__", "")
    return loaded or version(package)
