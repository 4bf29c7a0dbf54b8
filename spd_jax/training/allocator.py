"""Memory that training on a CPU gives back and asks for again at every operation.

XLA asks malloc for the buffers of every execution; glibc gets large ones from the kernel and returns them, and the page
faults of fresh pages cost more than the arithmetic on them (two to three times for an addition of 50 MB).
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h of glibc
_KEEP, _PAD = 2**31 - 1, 2**28


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep what is freed; says whether it did (elsewhere nothing happens).

    The process then holds its peak memory until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEEP), (_M_TOP_PAD, _PAD))
    return all(mallopt(option, value) == 1 for option, value in wanted)
