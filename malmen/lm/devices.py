"""Where a process computes, and in which type; it needs torch only."""

from __future__ import annotations

import resource
import sys
from typing import cast

import torch

from malmen.config import SPLIT, ModelConfig
from malmen.errors import EditError, UsageError


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


def resolve_dtype(config: ModelConfig) -> torch.dtype:
    """The type this process would give the model's weights."""
    if config.dtype == "auto":
        on_gpu = resolve_device(config).type == "cuda"
        has_it = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)  # emulated, float32 is faster
        return torch.bfloat16 if has_it else torch.float32
    return cast(torch.dtype, getattr(torch, config.dtype))


def peak_memory_mb() -> dict[str, float]:
    """The most memory that this process has held so far, in MB by device: `rss`, and `gpu` where there is one."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
    peaks = {"rss": round(peak, 1)}
    if torch.cuda.is_available():
        peaks["gpu"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return peaks
