"""Tensors as numpy arrays, which Ray's object store hands to a reader without a copy (torch's it would copy)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]


def to_array(tensor: Tensor) -> np.ndarray:
    """numpy has no bfloat16: it travels as int16, which nothing else here is."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of one's own: what the object store hands out is read-only and shared."""
    tensor = torch.from_numpy(np.array(array))
    return (tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor).to(device)


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """By name."""
    return {name: to_array(tensor) for name, tensor in tensors.items()}


def num_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """What it takes to send them."""
    return sum(array.nbytes for array in arrays.values())
