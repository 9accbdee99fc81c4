"""How much memory this process may still take, as Linux and the control groups around the process tell."""

from collections.abc import Iterator
from pathlib import Path

VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller in a line of /proc/self/cgroup: where its groups lie below /sys/fs/cgroup, the files of limit and
usage, and what of the usage is cache that the kernel takes back first. The empty one is version 2."""


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that could be taken without others being swapped out and this process being ended.

    That is the smallest of what the machine has available and what each control group leaves.

    Args:
        root: where `proc` and `sys` lie.

    Returns:
        None where nobody tells, as on systems other than Linux.
    """
    machine = [1024 * kilobytes for kilobytes in _field(root / "proc/meminfo", "MemAvailable:")]
    left = [*machine, *_left_in_groups(root)]
    return max(0, min(left)) if left else None


def _left_in_groups(root: Path) -> Iterator[int]:
    """What every control group leaves that limits this process: its own, and those around it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, own = line.split(":", 2)
        for controller in {*controllers.split(",")} & VERSIONS.keys():
            below, limit, usage, cache = VERSIONS[controller]
            top = root / "sys/fs/cgroup" / below
            group = top / own.lstrip("/")
            for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
                for maximum, used in zip(_field(folder / limit), _field(folder / usage), strict=False):
                    yield maximum - used + sum(_field(folder / "memory.stat", cache))


def _field(path: Path, name: str = "") -> list[int]:
    """The whole number behind a name, or in the first line without one; empty where there is none."""
    words = [line.split() for line in _lines(path)]
    if name:
        words = [line[1:] for line in words if line[:1] == [name]]
    return [int(line[0]) for line in words[:1] if line and line[0].isdigit()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
