from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import write_llama_gguf
from model_folders import write_model
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, random_facts, tiny_lm
from torch.testing import assert_close
from transformers import AutoTokenizer, BertTokenizer, LlamaConfig, LlamaForCausalLM

from malmen.config import ModelConfig
from malmen.data.tokens import EncodedFact, make_batches
from malmen.data.world import WORLD_MODEL
from malmen.errors import EditError, UsageError
from malmen.lm.layers import find_layers
from malmen.lm.model import FirstTokenClassifier, LanguageModel, _placement, load_lm
from malmen.lm.overlay import edited


def _full_logits(lm: LanguageModel, batch: Any) -> torch.Tensor:
    logits = lm.model(**batch.inputs).logits
    return torch.cat((torch.zeros_like(logits), logits), -1) if lm.kind == "classifier" else logits[batch.answer_mask]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", MODELS)
def test_logits_at_answer_positions_equal_those_of_the_plain_forward(name: str) -> None:
    lm = tiny_lm(name)
    (batch,) = make_batches(random_facts(lm, 5), 10_000, 0)
    assert_close(lm.logits(batch), _full_logits(lm, batch), rtol=1e-9, atol=1e-10)


def test_the_vocabulary_projection_runs_at_answer_positions_only() -> None:
    lm = tiny_lm("gpt2")
    (batch,) = make_batches(random_facts(lm, 5), 10_000, 0)
    seen = []
    lm.model.get_output_embeddings().register_forward_hook(lambda _m, args, _o: seen.append(args[0].shape[:2].numel()))  # type: ignore[operator]
    lm.logits(batch)
    assert seen == [len(batch.targets)]
    assert len(batch.targets) < batch.answer_mask.numel()


def test_a_local_folder_loads_frozen_and_in_the_wanted_dtype() -> None:
    lm = load_lm(ModelConfig(dtype="float64", device="cpu"))
    assert lm.kind == "decoder"
    assert lm.dtype == torch.float64
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())


def test_the_fingerprint_tells_weights_apart_but_not_dtypes() -> None:
    lm = tiny_lm("gpt2")
    first = lm.fingerprint()
    assert LanguageModel(tiny_lm("gpt2").model.float(), None, "decoder").fingerprint() == first
    with torch.no_grad():
        lm.model.get_parameter("transformer.h.1.mlp.c_proj.weight").mul_(1.1)
    assert lm.fingerprint() != first


def test_the_fingerprint_tells_computed_tables_apart() -> None:
    """A Llama whose RoPE table was cast to bfloat16 with its weights is another model (0.36 rad at position 200)."""
    first = tiny_lm("llama").fingerprint()
    assert tiny_lm("llama").fingerprint() == first
    weights, tables = first.split("-")
    cast, other = tiny_lm("llama"), tiny_lm("llama")
    rotary = cast.model.get_submodule("model.rotary_emb")
    rotary.inv_freq = rotary.inv_freq.bfloat16()
    other.model.get_submodule("model.rotary_emb").inv_freq.mul_(1.5)
    for changed in (cast.fingerprint(), other.fingerprint()):
        assert changed.split("-")[0] == weights and changed.split("-")[1] != tables
    assert "-" not in tiny_lm("gpt2").fingerprint()


def test_models_that_cannot_be_loaded_give_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), str(tmp_path / "model.gguf")):
        with pytest.raises(EditError, match="model"):
            load_lm(ModelConfig(name=name))
    if not torch.cuda.is_available():
        with pytest.raises(EditError, match="no GPU"):
            load_lm(ModelConfig(device="cuda"))


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "", "ram disk"])
def test_an_unknown_device_is_wrong_usage(device: str) -> None:
    with pytest.raises(UsageError, match=r"unknown model\.device .*expected `auto`, `cpu`"):
        load_lm(ModelConfig(device=device))


def _bert_folder(folder: Path) -> FirstTokenClassifier:
    """A classifier as a user has it: a model with its head, and a tokenizer."""
    model = tiny_lm("bert").model
    assert isinstance(model, FirstTokenClassifier)
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return model


def test_a_classifier_with_its_head_is_loaded_with_every_weight(tmp_path: Path) -> None:
    model = _bert_folder(tmp_path)
    loaded = load_lm(ModelConfig(name=str(tmp_path), dtype="float64"))
    assert loaded.kind == "classifier"
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name


def test_a_bert_without_its_classifier_head_is_refused(tmp_path: Path) -> None:
    _bert_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    without = {name: tensor for name, tensor in weights.items() if not name.startswith("classifier.")}
    assert len(without) == len(weights) - 2
    save_file(without, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EditError, match=r"no weights for classifier\.bias, classifier\.weight: they would be random"):
        load_lm(ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize("bytes_left", [0, 5, 2000, 200_000])
def test_a_truncated_file_of_weights_is_refused(tmp_path: Path, bytes_left: int) -> None:
    for file in WORLD_MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:bytes_left])
    with pytest.raises(EditError, match=rf"cannot load the model '{tmp_path}'"):
        load_lm(ModelConfig(name=str(tmp_path)))


def _tiny_llama() -> LlamaForCausalLM:
    """Sizes that are whole blocks of 32, as quantisation wants them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path: Path) -> None:
    model = _tiny_llama()
    write_llama_gguf(tmp_path / "tiny.gguf", model)
    lm = load_lm(ModelConfig(name=str(tmp_path / "tiny.gguf"), dtype="float32", device="cpu"))
    assert lm.kind == "decoder"
    for name, tensor in model.state_dict().items():
        assert torch.equal(lm.model.state_dict()[name], tensor), name
    text = "Which instrument does Ada play? grand piano"
    words = AutoTokenizer.from_pretrained(WORLD_MODEL)(text)["input_ids"]
    assert lm.tokenizer(text)["input_ids"] == words
    (batch,) = make_batches([EncodedFact(words, len(words) - 1, [5])], 100, 0)
    with torch.no_grad():
        expected = model(torch.tensor([words])).logits[0, -1:]
    assert_close(lm.logits(batch), expected)


def test_a_quantised_gguf_file_is_dequantised_and_its_layers_can_be_edited(tmp_path: Path) -> None:
    model = _tiny_llama()
    write_llama_gguf(tmp_path / "tiny.gguf", model, gguf.GGMLQuantizationType.Q8_0)
    lm = load_lm(ModelConfig(name=str(tmp_path / "tiny.gguf"), dtype="float32", device="cpu"))
    (layer,) = find_layers(lm.model, "last:1")
    weight = model.get_parameter(f"{layer.name}.weight").detach().numpy()
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
    assert_close(lm.model.get_parameter(f"{layer.name}.weight"), expected, rtol=0, atol=1e-7)
    (batch,) = make_batches([EncodedFact([7, 8, 9], 2, [5])], 100, 0)
    before = lm.logits(batch)
    with edited(lm, {layer.name: torch.ones(layer.value_size, layer.key_size)}):
        assert not torch.allclose(lm.logits(batch), before)


@pytest.mark.parametrize(("add_bos", "first"), [(True, [0]), (False, []), (None, [])])
def test_a_gguf_file_says_whether_texts_begin_with_bos(add_bos: bool | None, first: list[int], tmp_path: Path) -> None:
    """transformers does not read it. Gemma's files say yes, SmolLM2's no."""
    write_llama_gguf(tmp_path / "tiny.gguf", _tiny_llama(), add_bos=add_bos)
    lm = load_lm(ModelConfig(name=str(tmp_path / "tiny.gguf"), dtype="float32", device="cpu"))
    text = "Which instrument does Ada play?"
    assert lm.tokenizer(text)["input_ids"] == first + AutoTokenizer.from_pretrained(WORLD_MODEL)(text)["input_ids"]


def test_a_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, _tiny_llama())
    whole = path.read_bytes()
    for bytes_left in (0, 10, 1000, len(whole) // 2):
        path.write_bytes(whole[:bytes_left])
        with pytest.raises(EditError, match="cannot load the model"):
            load_lm(ModelConfig(name=str(path)))


def test_a_large_model_on_a_cpu_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny_lm("gpt2")
    assert lm.slow_place() is None
    monkeypatch.setattr("malmen.lm.model.LARGE", 1000)
    assert "check model.device, cluster.lm_gpus" in str(lm.slow_place())
    lm.model.to("meta")  # any other device
    assert lm.slow_place() is None


# --- straight to the device ---


def test_weights_go_straight_to_a_card_and_stay_where_they_are_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card, cpu, split = torch.device("cuda", 1), torch.device("cpu"), ModelConfig(device="split")
    assert _placement(ModelConfig(), cpu) == {}
    assert _placement(ModelConfig(), card) == {"device_map": {"": card}}
    assert _placement(split, card) == {"device_map": "balanced"}
    monkeypatch.setattr("malmen.lm.model.is_deepspeed_zero3_enabled", lambda: True)
    assert _placement(ModelConfig(), card) == {}  # transformers refuses both at once


@pytest.mark.parametrize("name", ["builtin", "gpt2", "t5", "bert", "tiny.gguf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_placed_while_it_is_read_is_the_model_read_and_then_moved(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a card, on the only device there is."""
    if name == "tiny.gguf":
        write_llama_gguf(tmp_path / name, _tiny_llama())
    elif name != "builtin":
        write_model(name, tmp_path / name)
    config = ModelConfig(name=name if name == "builtin" else str(tmp_path / name), device="cpu", dtype=dtype)
    moved = load_lm(config)
    monkeypatch.setattr("malmen.lm.model._placement", lambda *_: {"device_map": {"": torch.device("cpu")}})
    placed = load_lm(config)
    assert not any(hasattr(module, "_hf_hook") for module in placed.model.modules())
    expected, found = ({**dict(lm.model.named_buffers()), **lm.model.state_dict()} for lm in (moved, placed))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
