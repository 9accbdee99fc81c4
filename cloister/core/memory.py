"""Free memory for this process, by Linux and its control groups."""

from pathlib import Path

VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller in a line of /proc/self/cgroup: the folder of its groups below /sys/fs/cgroup, the files of limit
and usage, and the field for reclaimable cache within the usage. The empty controller is version 2."""


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping or being killed.

    This is the minimum of the machine's available memory and the remainder of each control group.

    Args:
        root: parent of `proc` and `sys`.

    Returns:
        None if the system does not report it, as on systems other than Linux.
    """
    left = [1024 * kilobytes for kilobytes in _field(root / "proc/meminfo", "MemAvailable:")]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, own = line.split(":", 2)
        for controller in {*controllers.split(",")} & VERSIONS.keys():
            below, limit, usage, cache = VERSIONS[controller]
            top = root / "sys/fs/cgroup" / below
            group = top / own.lstrip("/")
            for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
                for maximum, used in zip(_field(folder / limit), _field(folder / usage), strict=False):
                    left.append(maximum - used + sum(_field(folder / "memory.stat", cache)))
    return max(0, min(left)) if left else None


def _field(path: Path, name: str = "") -> list[int]:
    """Return the integer after a name, or without a name that in the first line; empty if absent."""
    words = [line.split() for line in _lines(path)]
    if name:
        words = [line[1:] for line in words if line[:1] == [name]]
    return [int(line[0]) for line in words[:1] if line and line[0].isdigit()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
