"""Where a process computes, and in which type; it needs torch only."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import sys
from functools import cache, partial
from timeit import repeat
from typing import cast

import torch

from malmen.config import SPLIT, ModelConfig
from malmen.errors import EditError, UsageError, last_line
from malmen.lm.cards import find_card

_WIDE = 512  # hidden states below this size gain little by bfloat16
_WORTH_IT = 1.5  # times as fast, to give up digits for it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE_BLOCK = 16 * 2**20  # a page fault for each 4 kB costs little beside the work on such a block


def resolve_device(config: ModelConfig) -> torch.device:
    """Where this process would put the model, or the first part of it."""
    name = "cuda:0" if config.device == SPLIT else config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise EditError(f"model.device is {config.device!r}, but torch sees no GPU here; use `cpu` or `auto`")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"unknown model.device {name!r}: expected `auto`, `cpu`, `cuda`, `cuda:N` or `split`"
        ) from error


def resolve_dtype(config: ModelConfig, width: int) -> torch.dtype:
    """The type this process would give the weights of a model whose hidden states have this size."""
    if config.dtype != "auto":
        return cast(torch.dtype, getattr(torch, config.dtype))
    if resolve_device(config).type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)  # emulated, float32 is faster
    else:
        has_it = width >= _WIDE and bfloat16_gain() >= _WORTH_IT
    return torch.bfloat16 if has_it else torch.float32


def slices_products(setting: str, rows: torch.Tensor) -> bool:
    """Whether `editor.products` means slices for these rows: float64 would lose digits in them, and `auto` wants them
    only on cards that are known to be slow in float64."""
    if rows.dtype == torch.float64 or setting != "auto":
        return rows.dtype != torch.float64 and setting == "sliced"
    card = find_card(torch.cuda.get_device_name(rows.device)) if rows.device.type == "cuda" else None
    return card is not None and card.slow_float64


@cache
def bfloat16_gain() -> float:
    """How many times as fast as float32 this CPU multiplies in bfloat16: 2 to 3 where it has instructions for it, 0.01
    where not. Takes 0.1 s, once in a process."""
    limit_kernel_cache()
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        seconds[dtype] = min(repeat(partial(torch.mm, left, right), number=1, repeat=5))
    return seconds[torch.float32] / seconds[torch.bfloat16]


def exhausted(error: BaseException) -> EditError | None:
    """What people are told of an error that would come again however often the work is repeated: this node has no
    memory or no disk left. None of any other error."""
    node = f"node {socket.gethostname()}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return EditError(
            f"{node} is out of memory: {last_line(error)}. In training, `malmen plan` says which settings fit: lower "
            "batch.token_budget, batch.hypernet_rows or training.num_edits, or use more processes"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return EditError(f"{node} has no disk space: {last_line(error)}. Make room; the same command resumes the run")
    return None


def peak_memory_mb() -> dict[str, float]:
    """The most memory that this process has held so far, in MB by device: `rss`, and `gpu` where there is one."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
    peaks = {"rss": round(peak, 1)}
    if torch.cuda.is_available():
        peaks["gpu"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return peaks


def release_freed_memory() -> None:
    """Give the system what glibc keeps of freed blocks, which may be half of a process. Takes milliseconds and page
    faults afterwards: call it after work of seconds. From then on blocks of 16 MB, not 32 as by default, go back as
    soon as they are freed, unless the environment says otherwise. Does nothing with another C library."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "malloc_trim") or not hasattr(library, "mallopt"):
        return
    if not {"MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BLOCK)  # else the heap's end would come and go
    library.malloc_trim(0)


def limit_kernel_cache() -> None:
    """Let oneDNN keep 64 compiled bfloat16 kernels, not 1,024, in what it runs from now on. Each is for one shape, and
    every micro-batch has another: 0.3 GB a step. Works before the process's first product in bfloat16."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
