from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from malmen.data.tokens import EncodedFact
from malmen.errors import EditError
from malmen.runs.fact_cache import FactCache, TensorLog


@pytest.fixture(params=["memory", "folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "folder" else None


def test_facts_are_known_by_content(folder: Path | None) -> None:
    cache = FactCache(1000, folder)
    cache.put(EncodedFact([1, 2, 3], 1, [4, 5]), {"keys": torch.ones(3)})
    assert cache.holds(["keys"], EncodedFact([1, 2, 3], 1, [4, 5]))
    for other in (
        EncodedFact([1, 2, 3], 1, [4, 6]),
        EncodedFact([1, 2], 1, [3, 4, 5]),
        EncodedFact([1, 2, 3], 2, [4, 5]),
        EncodedFact([1, 2, 3], 1, [4, 5], [7]),
    ):
        assert not cache.holds(["keys"], other)
    assert not cache.holds(["keys", "grads"], EncodedFact([1, 2, 3], 1, [4, 5]))
    assert not cache.holds([], EncodedFact([1, 2, 3], 1, [4, 5]))  # nothing can be kept of it, so nothing is known


def test_the_budget_holds_in_bytes_and_all_of_a_fact_is_taken_or_nothing(folder: Path | None) -> None:
    cache = FactCache(40, folder)
    one, two = EncodedFact([1], 0, [1]), EncodedFact([2], 0, [2])
    cache.put(one, {"keys": torch.zeros(4)})
    cache.put(two, {"keys": torch.zeros(4), "grads": torch.zeros(4)})
    assert (cache.used_bytes, cache.holds(["keys"], two)) == (16, False)
    cache.put(one, {"keys": torch.zeros(4), "grads": torch.zeros(2)})  # what is there is not counted again
    assert cache.used_bytes == 24


def test_a_view_does_not_keep_its_batch() -> None:
    cache, fact = FactCache(100), EncodedFact([1], 0, [1])
    batch = torch.arange(1000.0)
    cache.put(fact, {"keys": batch[:2]})
    assert cache.get("keys", fact).untyped_storage().nbytes() == 8
    batch[0] = 7
    assert cache.get("keys", fact).tolist() == [0, 1]


def test_a_folder_serves_several_caches_and_their_budget_is_the_folders(tmp_path: Path) -> None:
    one, other = FactCache(40, tmp_path), FactCache(40, tmp_path)
    facts = [EncodedFact([number], 0, [number]) for number in range(3)]
    one.put(facts[0], {"keys": torch.ones(4)})
    other.split(["keys"], facts)  # where it looks what the others have done
    other.put(facts[1], {"keys": torch.ones(4)})
    other.put(facts[2], {"keys": torch.ones(4)})
    known, fresh = FactCache(40, tmp_path).split(["keys"], facts)
    assert ([place for place, _ in known], [place for place, _ in fresh]) == ([0, 1], [2])


# --- tensors that processes share through a folder ---------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 5)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.arange(20)[: max(1, torch.Size(shape).numel())].to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    TensorLog(tmp_path).put({"a": torch.ones(7), "b": tensor, "c": torch.ones(3)})
    found = TensorLog(tmp_path)["b"]
    assert_close(found, tensor, rtol=0, atol=0)
    assert (found.dtype, found.shape) == (dtype, shape)


def test_a_view_is_kept_without_its_batch_and_not_as_it_becomes(tmp_path: Path) -> None:
    batch, log = torch.arange(10.0), TensorLog(tmp_path)
    log.put({"a": batch[::3]})
    batch.zero_()
    assert log["a"].tolist() == [0, 3, 6, 9]
    assert log.used_bytes == 16


def test_writers_read_each_other_and_the_first_to_write_a_name_stays(tmp_path: Path) -> None:
    one, other = TensorLog(tmp_path), TensorLog(tmp_path)
    one.put({"a": torch.zeros(2)})
    assert "a" not in other
    other.refresh()
    other.put({"a": torch.ones(2), "b": torch.ones(2)})
    assert other["a"].tolist() == [0, 0]
    one.refresh()
    assert one["b"].tolist() == [1, 1]
    one.put({"c": torch.full((2,), 2.0)})  # after its file was read by the other
    other.refresh()
    assert other["c"].tolist() == [2, 2]
    assert one.used_bytes == other.used_bytes == 24


def test_what_a_killed_writer_left_half_done_is_passed_over(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from malmen.runs.fact_cache import TensorLog\n"
        "log = TensorLog(Path(sys.argv[1]))\n"
        "log.put({'whole': torch.arange(4.0)})\n"
        "log._data.write(b'bytes without a line'); log._data.flush()\n"
        'log._index.write(b\'{"name": "half", "offs\'); log._index.flush()\n'
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    log = TensorLog(tmp_path)
    assert log["whole"].tolist() == [0, 1, 2, 3]
    assert "half" not in log
    log.put({"half": torch.ones(1)})
    assert TensorLog(tmp_path)["half"].tolist() == [1]


def test_a_damaged_file_is_told_with_the_remedy(tmp_path: Path) -> None:
    TensorLog(tmp_path).put({"a": torch.ones(8)})
    (file,) = tmp_path.glob("*.bin")
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(EditError, match="is damaged: delete"):
        TensorLog(tmp_path)["a"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EditError, match="cannot create the cache folder"):
        TensorLog(tmp_path / "file" / "cache")
