"""Tensors as numpy arrays: Ray's object store gives those to readers without a copy, unlike torch's tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]


def to_array(tensor: Tensor) -> np.ndarray:
    """On the CPU. bfloat16, which numpy lacks, becomes int16, which no other tensor here is."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """A copy: arrays in the object store are read-only and shared."""
    tensor = torch.from_numpy(np.array(array))
    return (tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor).to(device)


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """`to_array` of each."""
    return {name: to_array(tensor) for name, tensor in tensors.items()}


def num_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """The bytes of all arrays."""
    return sum(array.nbytes for array in arrays.values())
