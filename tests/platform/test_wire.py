from __future__ import annotations

import numpy as np
import pytest
import torch

from malmen.platform.wire import num_bytes, to_array, to_arrays, to_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_come_back_bit_equal_and_of_their_type(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, dtype=torch.float64).to(dtype)
    back = to_tensor(to_array(tensor.T))
    assert back.dtype == dtype
    assert torch.equal(back, tensor.T)


def test_what_is_received_may_be_written_into() -> None:
    array = np.ones(3)
    array.flags.writeable = False  # as the object store hands it out
    to_tensor(array).add_(1)
    assert array.tolist() == [1, 1, 1]


def test_bytes_are_those_that_travel() -> None:
    assert num_bytes(to_arrays({"a": torch.zeros(10, dtype=torch.bfloat16), "b": torch.zeros(2)})) == 28
