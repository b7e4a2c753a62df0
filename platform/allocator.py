"""Memory that is freed goes back to the system: glibc keeps large blocks otherwise, as much as a model again."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_SMALL, _LARGE = 2**20, 2**25  # what is larger is given back at once: in the block, and after it (glibc's most)


@contextmanager
def memory_given_back() -> Iterator[None]:
    """Within the block, blocks above 1 MB are the system's again as soon as they are freed; slower, so not for ever."""
    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")  # another libc keeps less, or has its own ways
    if known:
        libc.mallopt(_MMAP, _SMALL)
        libc.mallopt(_TRIM, _SMALL)
    try:
        yield
    finally:
        if known:
            libc.malloc_trim(0)
            libc.mallopt(_MMAP, _LARGE)
            libc.mallopt(_TRIM, 2 * _LARGE)
