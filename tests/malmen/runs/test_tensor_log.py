"""Tensors that processes share through a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from malmen.errors import EditError
from malmen.runs.tensor_log import TensorLog


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 5)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.arange(20)[: max(1, torch.Size(shape).numel())].to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    TensorLog(tmp_path).put({"a": torch.ones(7), "b": tensor, "c": torch.ones(3)})
    found = TensorLog(tmp_path).get("b")
    assert_close(found, tensor, rtol=0, atol=0)
    assert (found.dtype, found.shape) == (dtype, shape)


def test_a_view_is_kept_without_its_batch_and_not_as_it_becomes(tmp_path: Path) -> None:
    batch, log = torch.arange(10.0), TensorLog(tmp_path)
    log.put({"a": batch[::3]})
    batch.zero_()
    assert log.get("a").tolist() == [0, 3, 6, 9]
    assert log.used_bytes == 16


def test_writers_read_each_other_and_the_first_to_write_a_name_stays(tmp_path: Path) -> None:
    one, other = TensorLog(tmp_path), TensorLog(tmp_path)
    one.put({"a": torch.zeros(2)})
    assert "a" not in other
    other.refresh()
    other.put({"a": torch.ones(2), "b": torch.ones(2)})
    assert other.get("a").tolist() == [0, 0]
    one.refresh()
    assert one.get("b").tolist() == [1, 1]
    one.put({"c": torch.full((2,), 2.0)})  # after its file was read by the other
    other.refresh()
    assert other.get("c").tolist() == [2, 2]
    assert one.used_bytes == other.used_bytes == 24


def test_what_a_killed_writer_left_half_done_is_passed_over(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from malmen.runs.tensor_log import TensorLog\n"
        "log = TensorLog(Path(sys.argv[1]))\n"
        "log.put({'whole': torch.arange(4.0)})\n"
        "log._data.write(b'bytes without a line'); log._data.flush()\n"
        'log._index.write(b\'{"name": "half", "offs\'); log._index.flush()\n'
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    log = TensorLog(tmp_path)
    assert log.get("whole").tolist() == [0, 1, 2, 3]
    assert "half" not in log
    log.put({"half": torch.ones(1)})
    assert TensorLog(tmp_path).get("half").tolist() == [1]


def test_a_damaged_file_is_told_with_the_remedy(tmp_path: Path) -> None:
    TensorLog(tmp_path).put({"a": torch.ones(8)})
    (file,) = tmp_path.glob("*.bin")
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(EditError, match="is damaged: delete"):
        TensorLog(tmp_path).get("a")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EditError, match="cannot create the cache folder"):
        TensorLog(tmp_path / "file" / "cache")
