from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from exports import verified_manifest
from float64 import Float64Throughout
from full_disk import full_disk
from gguf_files import write_llama_gguf
from safetensors.torch import load_file
from tiny_models import random_facts, tiny_lm
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from untouched import count_hooks, digest

from malmen.config import ModelConfig
from malmen.data.tokens import TokenBatch, make_batches
from malmen.errors import EditError
from malmen.export import export_edit
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, load_lm
from malmen.lm.overlay import edited

EXPORTS = ("delta", "lora", "merged")
C_PROJ = "transformer.h.2.mlp.c_proj"


def _lm(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    lm = tiny_lm(name)
    return LanguageModel(lm.model.to(dtype), None, lm.kind)


def _shifts(lm: LanguageModel, layers: str | Sequence[str] = "last:2") -> dict[str, Tensor]:
    """Of rank 2, 3, 4, …, as few tokens make them."""
    torch.manual_seed(3)
    shifts = {}
    for rank, layer in enumerate(find_layers(lm.model, layers), start=2):
        up, down = torch.randn(layer.value_size, rank), torch.randn(rank, layer.key_size)
        shifts[layer.name] = 0.3 * up.to(lm.dtype) @ down.to(lm.dtype)
    return shifts


def _batch(lm: LanguageModel) -> TokenBatch:
    (batch,) = make_batches(random_facts(lm, 4), 10_000, 0)
    return batch


@torch.no_grad()
def _logits(model: Any, batch: TokenBatch) -> Tensor:
    """By the whole model's own forward."""
    logits: Tensor = model(**batch.inputs).logits
    return logits if logits.dim() == 2 else logits[batch.answer_mask]


def _snippet(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


def _load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that the code in README.md makes."""
    names: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(_snippet(folder), names)
    return names["model"].eval()


def _base(lm: LanguageModel, folder: Path) -> str:
    """The base model as others have it."""
    lm.model.save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
@pytest.mark.parametrize("kind", EXPORTS)
def test_what_the_readme_loads_equals_the_overlay_and_the_model_is_untouched(
    kind: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = _lm(name)
    base, shifts, batch = _base(lm, tmp_path / "base"), _shifts(lm), _batch(lm)
    before = (digest(lm), count_hooks(lm), lm.model.config.to_dict())  # type: ignore[union-attr, operator]
    manifest = export_edit(kind, tmp_path / "out", lm, shifts, model_name=base)
    assert (digest(lm), count_hooks(lm), lm.model.config.to_dict()) == before  # type: ignore[union-attr, operator]
    assert verified_manifest(tmp_path / "out") == manifest
    with edited(lm, shifts):
        expected = _logits(lm.model, batch)
    assert not torch.allclose(_logits(lm.model, batch), expected, atol=1e-2)
    assert_close(_logits(_load(tmp_path / "out", monkeypatch), batch), expected, rtol=1e-4, atol=1e-4)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["base", "out"]


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_float64_edit_is_exported_to_the_last_digits(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = _lm("gpt2", torch.float64)
    shifts, batch = _shifts(lm), _batch(lm)
    export_edit(kind, tmp_path / "out", lm, shifts, model_name=_base(lm, tmp_path / "base"))
    loaded = _load(tmp_path / "out", monkeypatch)
    with Float64Throughout(), edited(lm, shifts):
        assert_close(_logits(loaded, batch), _logits(lm.model, batch), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "layer"), [("gpt2", "transformer.h.1.attn.c_proj"), ("llama", "model.layers.1.self_attn.q_proj")]
)
@pytest.mark.parametrize("kind", EXPORTS)
def test_square_layers_are_not_confused_with_their_transposes(
    kind: Any, name: str, layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = _lm(name)
    shifts, batch = _shifts(lm, [layer]), _batch(lm)
    assert shifts[layer].shape[0] == shifts[layer].shape[1]
    monkeypatch.chdir(tmp_path)  # a path that is given from here is found from the export, too
    export_edit(kind, Path("out"), lm, shifts, model_name=_base(lm, Path("base")))
    with edited(lm, shifts):
        expected = _logits(lm.model, batch)
    assert_close(_logits(_load(tmp_path / "out", monkeypatch), batch), expected, rtol=1e-4, atol=1e-4)


def test_the_manifest_says_what_was_changed_and_for_what(tmp_path: Path) -> None:
    lm = _lm("gpt2")
    shifts = _shifts(lm)
    facts = [{"prompt": "Où ?", "answer": "là"}]
    export_edit("delta", tmp_path / "out", lm, shifts, facts=facts, model_name="gpt2", info={"step": 7})
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["kind"], manifest["facts"], manifest["info"]) == ("delta", facts, {"step": 7})
    assert manifest["base_model"]["fingerprint"] == lm.fingerprint()
    assert sorted(manifest["files"]) == ["README.md", "delta.safetensors"]
    tensors = load_file(tmp_path / "out" / "delta.safetensors")
    assert manifest["tensors"].keys() == tensors.keys() == {f"{name}.weight" for name in shifts}
    for name, delta in tensors.items():
        weight, stated = lm.model.get_parameter(name), manifest["tensors"][name]
        assert (stated["shape"], delta.dtype) == (list(weight.shape), torch.float32)
        assert stated["norm"] == pytest.approx(float(delta.norm()))
        assert stated["ratio"] == pytest.approx(float(delta.norm() / weight.norm()))


def test_an_adapter_has_the_rank_of_each_shift_and_loses_nothing_but_rounding(tmp_path: Path) -> None:
    lm = _lm("gpt2")
    shifts = {**_shifts(lm), "transformer.h.0.mlp.c_proj": torch.zeros(12, 48)}
    manifest = export_edit("lora", tmp_path / "out", lm, shifts, model_name="gpt2")
    found = [manifest["tensors"][f"{name}.weight"] for name in shifts]
    assert [row["full_rank"] for row in found] == [2, 3, 0]
    assert [row["rank"] for row in found] == [2, 3, 1]  # PEFT knows no rank 0
    assert all(row["relative_error"] < 5e-7 for row in found)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["task_type"], config["fan_in_fan_out"], config["r"]) == ("CAUSAL_LM", True, 3)
    assert config["target_modules"] == list(shifts)


@pytest.mark.parametrize("max_rank", [1, 3])
def test_a_truncated_adapter_is_the_best_of_its_rank_and_states_its_error(
    max_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = _lm("gpt2")
    torch.manual_seed(4)
    shift = torch.randn(12, 48)
    base = _base(lm, tmp_path / "base")
    manifest = export_edit("lora", tmp_path / "out", lm, {C_PROJ: shift}, model_name=base, max_rank=max_rank)
    stated = manifest["tensors"][f"{C_PROJ}.weight"]
    assert (stated["rank"], stated["full_rank"]) == (max_rank, 12)
    layer = _load(tmp_path / "out", monkeypatch).base_model.model.get_submodule(C_PROJ)
    measured = (layer.get_delta_weight("default").T - shift).norm() / shift.norm()
    best = torch.linalg.svdvals(shift)[max_rank:].norm() / shift.norm()
    assert stated["relative_error"] == pytest.approx(float(measured), rel=1e-5) == pytest.approx(float(best), rel=1e-5)


def test_a_merged_checkpoint_has_the_tokenizer_and_replaces_an_earlier_export(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifts = _shifts(lm)
    words = lm.tokenizer("Which instrument does Ada play?", return_tensors="pt")
    before = digest(lm)
    with edited(lm, shifts), torch.no_grad():
        expected = lm.model(**words).logits
    for kind in EXPORTS:  # `builtin` is a name that only we know: README.md says where it is
        export_edit(kind, tmp_path / "out", lm, shifts, model_name="builtin")  # type: ignore[arg-type]
        with torch.no_grad():
            assert_close(_load(tmp_path / "out", monkeypatch)(**words).logits, expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("Ada")["input_ids"] == lm.tokenizer("Ada")["input_ids"]
    assert not (tmp_path / "out" / "delta.safetensors").exists()
    assert digest(lm) == before


def test_a_merged_model_from_gguf_is_no_longer_quantised(tmp_path: Path) -> None:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip
    write_llama_gguf(tmp_path / "tiny.gguf", llama, gguf.GGMLQuantizationType.Q8_0)
    lm = load_lm(ModelConfig(name=str(tmp_path / "tiny.gguf"), dtype="float32", device="cpu"))
    packed = {"quant_method": "gguf", "gguf_file": "tiny.gguf"}  # as some versions of transformers leave it behind
    lm.model.config.quantization_config = packed  # type: ignore[union-attr]
    shifts, batch = _shifts(lm, "last:1"), _batch(lm)
    export_edit("merged", tmp_path / "out", lm, shifts, model_name=str(tmp_path / "tiny.gguf"))
    assert lm.model.config.quantization_config == packed  # type: ignore[union-attr]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    with edited(lm, shifts):
        expected = _logits(lm.model, batch)
    assert_close(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), batch), expected, rtol=1e-4, atol=1e-4)


def test_a_merged_half_precision_model_states_what_rounding_took(tmp_path: Path) -> None:
    lm = _lm("gpt2", torch.bfloat16)
    torch.manual_seed(5)
    shift = 1e-4 * torch.randn(12, 48)
    manifest = export_edit("merged", tmp_path / "out", lm, {C_PROJ: shift}, model_name="gpt2")
    written = load_file(tmp_path / "out" / "model.safetensors")[f"{C_PROJ}.weight"].double().T
    exact = lm.model.get_parameter(f"{C_PROJ}.weight").double().T + shift
    stated = manifest["tensors"][f"{C_PROJ}.weight"]["rounding_error"]
    assert stated == pytest.approx(float((written - exact).norm() / shift.norm()), rel=1e-4)
    assert stated > 0.2  # which is why a delta is stored in float32
    export_edit("delta", tmp_path / "out", lm, {C_PROJ: shift}, model_name="gpt2")
    assert torch.equal(load_file(tmp_path / "out" / "delta.safetensors")[f"{C_PROJ}.weight"], shift.T)
    assert "dtype='float32'" in _snippet(tmp_path / "out")


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize(
    ("shifts", "max_rank", "message"),
    [
        ({C_PROJ: torch.full((12, 48), torch.nan)}, 4, "has 576 numbers that are not finite; expected none"),
        ({C_PROJ: torch.full((12, 48), 1e300, dtype=torch.float64)}, 4, "576 numbers that are not finite"),
        ({C_PROJ: torch.zeros(48, 12)}, 4, r"is \(48, 12\); expected \(12, 48\)"),
        ({C_PROJ: torch.zeros(12, 48)}, 0, "max_rank is 0: expected 1 or more"),
        ({"transformer.h.2.mlp.cproj": torch.zeros(12, 48)}, 4, f"does not exist; the nearest .*{C_PROJ}"),
        ({}, 4, "changes no layer"),
    ],
)
def test_an_edit_that_cannot_be_exported_is_refused_and_nothing_is_written(
    kind: Any, shifts: dict[str, Tensor], max_rank: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(EditError, match=message):
        export_edit(kind, tmp_path / "new" / "out", _lm("gpt2"), shifts, model_name="gpt2", max_rank=max_rank)
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="unknown kind of export 'onnx': expected delta, lora, merged"):
        export_edit("onnx", tmp_path / "out", _lm("gpt2"), {}, model_name="gpt2")  # type: ignore[arg-type]


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    lm = _lm("gpt2")
    taken, foreign, base = tmp_path / "taken", tmp_path / "foreign", tmp_path / "base"
    for folder, file in ((taken, "README.md"), (foreign, "manifest.json")):
        folder.mkdir()
        (folder / file).write_text("{}")
    export_edit("merged", base, lm, _shifts(lm), model_name="gpt2")  # an edited model may be edited again
    for folder, message in ((taken, "not replaced"), (foreign, "no manifest of an export"), (base, "base model")):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(EditError, match=message):
            export_edit("delta", folder, lm, _shifts(lm), model_name=str(base))
        assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_full_disk_is_an_os_error_and_leaves_the_earlier_export(kind: Any, tmp_path: Path) -> None:
    lm = _lm("gpt2")
    before = export_edit("delta", tmp_path / "out", lm, _shifts(lm, "last:1"), model_name="gpt2")
    with full_disk(left=1500), pytest.raises(OSError):
        export_edit(kind, tmp_path / "out", lm, _shifts(lm, "all"), model_name="gpt2")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert verified_manifest(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "format is None"), ('{"format": 9}', "format is 9")],
)
def test_a_manifest_that_is_none_of_an_exports_is_not_replaced(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(EditError, match=message):
        export_edit("delta", tmp_path, _lm("gpt2"), _shifts(_lm("gpt2")), model_name="gpt2")
    assert (tmp_path / "manifest.json").read_text() == text
