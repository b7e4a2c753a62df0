from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

# Blocks of 8 MB, each with a smaller one behind it that stays: glibc cannot return the end of its heap.
CODE = """
import ctypes, sys, psutil
from contextlib import nullcontext
from malmen.platform.sharding import memory_given_back
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def fill(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block
libc.free(fill(2**24))  # glibc learns that such sizes are freed, and keeps them from now on
before = psutil.Process().memory_info().rss
with memory_given_back() if sys.argv[1] == "given_back" else nullcontext():
    blocks = [(fill(2**23), fill(100_000)) for _ in range(20)]
    for large, _ in blocks:
        libc.free(large)
    print((psutil.Process().memory_info().rss - before) // 2**20)
"""


@pytest.mark.skipif(not psutil.LINUX, reason="glibc's ways, and those of other systems differ")
@pytest.mark.parametrize(("way", "kept"), [("given_back", range(10)), ("as_it_is", range(100, 200))])
def test_what_is_freed_is_given_back_though_glibc_would_keep_it(way: str, kept: range) -> None:
    ran = subprocess.run([sys.executable, "-c", CODE, way], capture_output=True, text=True, timeout=120, check=True)
    assert int(ran.stdout) in kept


def sharded_beside_whole(name: str, dtype: str, folder: Path) -> object:
    script = Path(__file__).parent.parent / "support" / "sharded_models.py"
    command = [sys.executable, str(script), name, dtype, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.deepspeed
@pytest.mark.slow  # a process imports DeepSpeed
def test_a_llama_in_bfloat16_is_the_same_model_sharded_and_whole_at_far_positions(tmp_path: Path) -> None:
    assert sharded_beside_whole("llama", "bfloat16", tmp_path) == {
        "equal": True, "buffers": ["torch.float32"], "same_model": True, "weights": "torch.bfloat16",
    }  # fmt: skip


@pytest.mark.deepspeed
@pytest.mark.slow  # a process imports DeepSpeed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_t5_whose_head_is_not_its_embedding_keeps_it_when_sharded(dtype: str, tmp_path: Path) -> None:
    assert sharded_beside_whole("t5", dtype, tmp_path) == {
        "equal": True, "buffers": [], "same_model": True, "weights": f"torch.{dtype}",
    }  # fmt: skip
