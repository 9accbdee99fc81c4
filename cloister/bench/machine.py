"""Description of the machine of a benchmark, and of its load."""

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ALWAYS, IF_LOADED = ("cloister", "flwr", "numpy", "cryptography"), ("tensorflow", "keras", "numba")
"""Packages whose versions are recorded."""


@dataclass(frozen=True)
class Machine:
    """A machine at one moment.

    Attributes:
        processor: its name, if the system reports it.
        cores: number of cores that this process may use.
        memory: bytes; 0: the system does not report it.
        load: mean number of running or waiting programs in the last minute; None: the system does not report it.
        versions: of Python and of packages.
    """

    processor: str
    cores: int
    memory: int
    load: float | None
    versions: dict[str, str]

    @classmethod
    def now(cls) -> "Machine":
        """Return this machine at this moment."""
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
    # The package tensorflow has several distributions; all of them set this attribute.
    loaded = getattr(sys.modules.get(package), "__version__", "")
    return loaded or version(package)
