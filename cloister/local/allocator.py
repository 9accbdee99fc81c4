"""Reuse of a process's memory between models."""

import ctypes
from functools import cache

MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD = -3, 32 << 20
"""Key of the array size in bytes from which glibc maps each array separately, and its largest value."""
TRIM_THRESHOLD, KEPT = -1, 512 << 20
"""Key of the number of free bytes that glibc keeps at the end of its heap, and its value."""


@cache
def keep_memory() -> None:
    """Let glibc reuse freed memory for later arrays. Without glibc this has no effect.

    The models of a round are freed together. By default, glibc returns their pages, and the kernel clears each page for
    the next round. Arrays of more than 32 MB are still mapped separately. The setting applies to the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(TRIM_THRESHOLD, KEPT)
