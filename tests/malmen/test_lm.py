from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, random_facts, tiny_lm
from torch.testing import assert_close

from malmen.config import ModelConfig
from malmen.data.tokens import make_batches
from malmen.errors import EditError
from malmen.layers import find_layers
from malmen.lm import FirstTokenClassifier, LanguageModel, keep_stem, load_lm, resume_stem, stem_blocks
from malmen.overlay import edited


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


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("rule", ["last:1", "last:2", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_resuming_above_the_stem_equals_the_whole_forward(name: str, rule: str) -> None:
    lm = tiny_lm(name)
    layers = find_layers(lm.model, rule)
    torch.manual_seed(3)
    shifts = {layer.name: torch.randn(layer.value_size, layer.key_size, dtype=torch.float64) for layer in layers}
    (batch,) = make_batches(random_facts(lm, 5), 10_000, 0)
    with edited(lm, shifts):
        expected = lm.logits(batch)
    blocks = stem_blocks(lm, layers)
    with torch.no_grad(), keep_stem(lm, blocks) as stem:
        before = lm.logits(batch)
    with edited(lm, shifts), resume_stem(lm, blocks, stem):
        found = lm.logits(batch)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert_close(lm.logits(batch), before, rtol=0, atol=0)


@pytest.mark.usefixtures("exact")
def test_an_edit_of_the_decoder_alone_keeps_the_whole_encoder() -> None:
    lm = tiny_lm("t5")
    layers = [layer for layer in find_layers(lm.model, "last:1") if layer.stack == "decoder"]
    assert stem_blocks(lm, layers) == {"encoder": 3, "decoder": 2}
    assert stem_blocks(lm, find_layers(lm.model, "last:1")) == {"encoder": 2}
    (batch,) = make_batches(random_facts(lm, 3), 10_000, 0)
    with torch.no_grad(), keep_stem(lm, stem_blocks(lm, layers)) as stem:
        expected = lm.logits(batch)
    with resume_stem(lm, stem_blocks(lm, layers), stem):
        assert_close(lm.logits(batch), expected, rtol=1e-12, atol=1e-12)


def test_blocks_below_the_stem_do_not_run_when_resuming_and_run_again_after_an_exception() -> None:
    lm = tiny_lm("gpt2")
    layers = find_layers(lm.model, "last:1")
    (batch,) = make_batches(random_facts(lm, 3), 10_000, 0)
    runs = []
    lm.model.get_submodule("transformer.h.0.mlp").register_forward_hook(lambda *_: runs.append(1))
    with keep_stem(lm, stem_blocks(lm, layers)) as stem:
        lm.logits(batch)
    assert len(runs) == 1
    with pytest.raises(ZeroDivisionError), resume_stem(lm, stem_blocks(lm, layers), stem):
        lm.logits(batch)
        raise ZeroDivisionError
    assert len(runs) == 1
    lm.logits(batch)
    assert len(runs) == 2


def test_a_local_folder_loads_frozen_and_in_the_wanted_dtype() -> None:
    lm = load_lm(ModelConfig(dtype="float64", device="cpu"))
    assert lm.kind == "decoder"
    assert lm.dtype == torch.float64
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())


def test_a_classifier_folder_keeps_its_head(tmp_path: Path) -> None:
    model = tiny_lm("bert").model
    assert isinstance(model, FirstTokenClassifier)
    model.save_pretrained(tmp_path)
    loaded = FirstTokenClassifier.from_pretrained(tmp_path)
    assert_close(loaded.classifier.weight.double(), model.classifier.weight)


def test_the_fingerprint_tells_weights_apart_but_not_dtypes() -> None:
    lm = tiny_lm("gpt2")
    first = lm.fingerprint()
    assert LanguageModel(tiny_lm("gpt2").model.float(), None, "decoder").fingerprint() == first
    with torch.no_grad():
        lm.model.get_parameter("transformer.h.1.mlp.c_proj.weight").mul_(1.1)
    assert lm.fingerprint() != first


def test_models_that_cannot_be_loaded_give_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), str(tmp_path / "model.gguf")):
        with pytest.raises(EditError, match="model"):
            load_lm(ModelConfig(name=name))
    if not torch.cuda.is_available():
        with pytest.raises(EditError, match="no GPU"):
            load_lm(ModelConfig(device="cuda"))
