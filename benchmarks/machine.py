"""What a benchmark runs on, from the standard library alone: other environments import it too."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("flwr", "numpy", "cryptography", "numba", "tensorflow", "tensorflow-cpu", "keras", "torch", "opacus")


def machine() -> None:
    """Print what the numbers were measured on, and how busy it was."""
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(
        f"{processor.split(':')[1].strip()}, {os.cpu_count()} cores, {memory:.0f} GiB; Python "
        f"{sys.version.split()[0]}, {', '.join(versions())}; load {load()} at the start\n",
        flush=True,
    )


def versions() -> list[str]:
    """Packages that are installed, with their versions."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def load() -> str:
    """Programs that ran or waited for a core in the last minute, on average."""
    return f"{os.getloadavg()[0]:.1f}"
