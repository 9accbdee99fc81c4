"""Memory that a process has used stays with it, so that the next model finds it there."""

import ctypes
from functools import cache

MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD = -3, 32 << 20
"""The key of the size in bytes from which glibc asks the system for every array by itself, and its largest value."""
TRIM_THRESHOLD, KEPT = -1, 512 << 20
"""The key of how many free bytes glibc keeps at the end of its memory, and how many it is to keep."""


@cache
def keep_memory() -> None:
    """Let glibc hand freed memory to the next array, not back to the system; without glibc nothing happens.

    The models of a round are freed together. The system would take their pages back, and clear each of them when the
    next round touches it. Arrays of more than 32 MB are still asked for one by one. It holds for the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(TRIM_THRESHOLD, KEPT)
