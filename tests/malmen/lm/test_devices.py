"""A model that accelerate has cut: every layer behind its hook, as over several GPUs; here all of them are the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from full_disk import full_disk
from tiny_models import make_setup, random_facts, tiny_lm
from torch.testing import assert_close

from malmen.config import Config, ModelConfig
from malmen.data.tokens import MetaBatch, make_batches
from malmen.errors import EditError, UsageError
from malmen.lm.devices import (
    bfloat16_gain,
    exhausted,
    peak_memory_mb,
    release_freed_memory,
    resolve_device,
    resolve_dtype,
)
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, model_dtype
from malmen.lm.overlay import Overlay, edited, edited_rows
from malmen.meta import meta_step
from malmen.methods.memit import Memit

pytestmark = pytest.mark.usefixtures("exact")


def _cut(lm: LanguageModel) -> LanguageModel:
    names = [name for name, module in lm.model.named_modules() if name and not list(module.children())]
    dispatch_model(lm.model, dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True)
    assert all(hasattr(lm.model.get_submodule(layer.name), "_hf_hook") for layer in find_layers(lm.model, "last:2"))
    return lm


def _shifts(lm: LanguageModel, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    layers = find_layers(lm.model, "last:2")
    return {layer.name: torch.randn(layer.value_size, layer.key_size, dtype=torch.float64) for layer in layers}


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_edits_over_a_cut_model_equal_those_over_a_whole_one(name: str) -> None:
    whole, cut = tiny_lm(name), _cut(tiny_lm(name))
    shifts = _shifts(whole, 1)
    (batch,) = make_batches(random_facts(whole, 4), 10_000, 0)
    with edited(whole, shifts), edited(cut, shifts):
        assert_close(cut.logits(batch), whole.logits(batch), rtol=1e-9, atol=1e-10)
    assert_close(cut.logits(batch), whole.logits(batch), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_rows_of_a_cut_model_see_their_own_edits_and_leave_nothing_behind(name: str) -> None:
    whole, cut = tiny_lm(name), _cut(tiny_lm(name))
    first, second = _shifts(whole, 1), _shifts(whole, 2)
    ids = torch.arange(15).reshape(3, 5)
    before = cut.model(input_ids=ids).logits
    with edited_rows(cut, [(Overlay.of(cut, first), 1), (None, 1), (Overlay.of(cut, second), 1)]):
        found = cut.model(input_ids=ids).logits
    for row, shifts in enumerate((first, {}, second)):
        with edited(whole, shifts):
            assert_close(found[row : row + 1], whole.model(input_ids=ids[row : row + 1]).logits, rtol=1e-9, atol=1e-9)
    assert torch.equal(cut.model(input_ids=ids).logits, before)


def test_a_step_of_training_over_a_cut_model_equals_one_over_a_whole_one(kind: str) -> None:
    whole, other = make_setup(kind), make_setup(kind)
    _cut(other.lm)
    lm = whole.lm
    batch = MetaBatch(random_facts(lm, 5, 1), random_facts(lm, 4, 2), random_facts(lm, 3, 3))
    for setup in (whole, other):
        meta_step(setup.lm, setup.editor, batch)
    for one, two in zip(whole.editor.parameters(), other.editor.parameters(), strict=True):
        assert_close(one, two, rtol=1e-9, atol=1e-11)


def test_cutting_a_model_where_there_is_no_gpu_is_an_error_that_says_so() -> None:
    asked = "from malmen import load_lm; from malmen.config import ModelConfig; load_lm(ModelConfig(device='split'))"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # where there are some, this process does not see them
    ran = subprocess.run([sys.executable, "-c", asked], env=hidden, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and "EditError: model.device is 'split', but torch sees no GPU" in ran.stderr


def test_an_unknown_device_is_named_with_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"'gpu'.*`cuda:N` or `split`"):
        resolve_device(ModelConfig(device="gpu"))


@pytest.mark.parametrize(
    ("gain", "width", "dtype"),
    [(2.8, 768, torch.bfloat16), (2.8, 160, torch.float32), (1.4, 768, torch.float32), (0.01, 4096, torch.float32)],
)
def test_by_itself_a_wide_model_is_in_bfloat16_on_a_cpu_that_is_faster_in_it(
    gain: float, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("malmen.lm.devices.bfloat16_gain", lambda: gain)
    assert resolve_dtype(ModelConfig(device="cpu"), width) == dtype
    assert resolve_dtype(ModelConfig(device="cpu", dtype="float64"), width) == torch.float64


def test_the_built_in_model_is_narrow_and_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malmen.lm.devices.bfloat16_gain", lambda: 100.0)
    assert model_dtype(ModelConfig(device="cpu")) == torch.float32


def test_the_gain_of_bfloat16_is_measured_once() -> None:
    assert bfloat16_gain() == bfloat16_gain() > 0


@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="needs an NVIDIA GPU")
def test_by_itself_a_model_is_in_bfloat16_only_on_a_gpu_that_does_not_emulate_it() -> None:
    since_ampere = torch.cuda.get_device_capability()[0] >= 8
    assert resolve_dtype(ModelConfig(device="cuda"), 768) == (torch.bfloat16 if since_ampere else torch.float32)


def test_memit_refuses_a_model_on_several_devices() -> None:
    lm = tiny_lm("gpt2")
    lm.model.get_submodule("transformer.ln_f").to("meta")
    with pytest.raises(EditError, match="MEMIT's values need the whole model on one device"):
        Memit(lm, Config())


def test_a_process_knows_its_peak() -> None:
    before = peak_memory_mb()["rss"]
    held = torch.ones(2**25)
    assert peak_memory_mb()["rss"] >= before > 0
    del held


def test_a_node_without_memory_or_disk_is_told_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as no_memory:
        torch.empty(2**50)
    with full_disk(left=100), pytest.raises(OSError) as no_disk:
        (tmp_path / "file").write_bytes(bytes(1000))
    for error, told in (
        (no_memory, "is out of memory: .*settings fit: lower batch.token_budget"),
        (no_disk, "has no disk space: .*resumes"),
    ):
        assert re.search(told, str(exhausted(error.value)))
    assert exhausted(RuntimeError("connection closed by peer")) is None
    assert exhausted(FileNotFoundError(2, "no such file")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    blocks = [torch.ones(2**14) for _ in range(1600)]  # 100 MB in blocks of 64 kB, a few of which stay
    kept = blocks[::160]
    blocks.clear()
    release_freed_memory()
    assert resident() - before < 20 * 2**20
    assert all(bool((block == 1).all()) for block in kept)
