"""What benchmarks/real_models.py does without a package: splits, reversed labels, int8 to float32, joined parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM

from malmen.data.built_models import true_claims
from malmen.data.readers import read_records
from malmen.data.records import Fact

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # its files import each other as scripts do
import fever_claims
import onnx_t5
import real_models


def claims(number: int) -> list[dict[str, Any]]:
    """Every second one has a near-paraphrase, which is the next one."""
    labels = ("SUPPORTS", "REFUTES")
    rows = [{"id": i, "claim": f"Town {i} lies in the valley.", "label": labels[i // 2 % 2]} for i in range(number)]
    for row, other in zip(rows[::2], rows[1::2], strict=True):
        row |= {"near_paraphrase": other["claim"], "jaccard": 0.7}
    return rows


def test_no_paraphrase_crosses_a_border_and_no_row_is_lost() -> None:
    rows = claims(200)
    train, validation = fever_claims.split_claims(rows, validation=40, unrelated=0.25, seed=3)
    parts = [train.edited, train.unrelated, validation.edited, validation.unrelated]
    assert sorted(row["id"] for part in parts for row in part) == list(range(200))
    assert [len(part) for part in parts] == [120, 40, 30, 10]
    part_of = {row["id"]: place for place, part in enumerate(parts) for row in part}
    assert all(part_of[number] == part_of[number + 1] for number in range(0, 200, 2))
    again = fever_claims.split_claims(rows, validation=40, unrelated=0.25, seed=3)
    assert again == (train, validation) != fever_claims.split_claims(rows, validation=40, unrelated=0.25, seed=4)


def test_edits_reverse_the_label_and_unrelated_claims_keep_theirs() -> None:
    train, _ = fever_claims.split_claims(rows := claims(40), validation=8, unrelated=0.5, seed=0)
    label = {row["claim"]: row["label"] for row in rows}
    records = fever_claims.reversals(train, seed=0)
    assert len(records) == len(train.edited)
    for record in records:
        assert record.edit.answer == fever_claims.flipped(label[record.edit.prompt]) != label[record.edit.prompt]
        assert {fact.answer for fact in record.equivalents} == {record.edit.answer}
    kept = {fever_claims.paraphrase(row, seed=0): row["label"] for row in train.unrelated}
    assert {fact for record in records for fact in record.unrelated} == {Fact(*pair) for pair in kept.items()}


@pytest.mark.parametrize(
    ("near", "overlap", "taken"),
    [
        ("In 1990, Ada moved to Oslo.", 1.0, True),
        ("Ada moved to Oslo in 1990, or so.", 0.8, False),  # too few words in common
        ("Ada never moved to Oslo in 1990.", 0.95, False),  # the opposite, in nearly the same words
        (None, 0, False),
    ],
)
def test_a_near_paraphrase_is_taken_only_if_it_says_the_same(near: str | None, overlap: float, taken: bool) -> None:
    row = {"claim": "Ada moved to Oslo in 1990.", "label": "SUPPORTS", "near_paraphrase": near, "jaccard": overlap}
    found = fever_claims.paraphrase(row, seed=0)
    assert (found == near) is taken
    assert taken or (found != row["claim"] and "Ada moved to Oslo in 1990" in found)


def test_the_files_are_read_as_the_same_claims_and_edits(tmp_path: Path) -> None:
    train, validation = fever_claims.split_claims(rows := claims(40), validation=8, unrelated=0.25, seed=0)
    counts = fever_claims.write_files(tmp_path, train, validation, seed=0)
    assert counts["claims-all"] == counts["claims-train"] + counts["claims-held-out"] == 40
    learnt = {fact.prompt: fact.answer for fact in true_claims(read_records(tmp_path / "claims-all.jsonl", "fever"))}
    assert learnt == {row["claim"]: row["label"] for row in rows}
    assert read_records(tmp_path / "edits-train.jsonl") == fever_claims.reversals(train, seed=0)


def test_of_a_claim_that_stands_twice_the_first_row_counts(tmp_path: Path) -> None:
    rows = [{"claim": "A", "label": "REFUTES"}, {"claim": "B", "label": "REFUTES"}, {"claim": "A", "label": "SUPPORTS"}]
    (tmp_path / "claims.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [row["label"] for row in fever_claims.read_claims(tmp_path / "claims.jsonl")] == ["REFUTES", "REFUTES"]


def test_int8_becomes_the_float_that_it_stands_for() -> None:
    values = torch.tensor([[-128, 0], [3, 127]], dtype=torch.int8)
    whole = onnx_t5.dequantised(values, torch.tensor(0.5), torch.tensor(3, dtype=torch.int8))
    assert_close(whole, torch.tensor([[-65.5, -1.5], [0.0, 62.0]]))
    columns = onnx_t5.dequantised(values, torch.tensor([1.0, 2.0]), torch.tensor([0, 127], dtype=torch.int8))
    assert_close(columns, torch.tensor([[-128.0, -254.0], [3.0, 0.0]]))
    high = onnx_t5.dequantised(torch.tensor([0, 255], dtype=torch.uint8), torch.tensor(1.0), torch.tensor(128))
    assert_close(high, torch.tensor([-128.0, 127.0]))  # nothing wraps around


@pytest.mark.parametrize(
    ("exported", "name"),
    [
        ("/enc/block.0/layer.1/DenseReluDense/wi_0/MatMul_quant", "encoder.block.0.layer.1.DenseReluDense.wi_0"),
        ("/m/decoder/block.7/layer.1/EncDecAttention/k/MatMul_quant", "decoder.block.7.layer.1.EncDecAttention.k"),
        ("/m/lm_head/MatMul_quant", "lm_head"),
        ("enc.final_layer_norm.weight", "encoder.final_layer_norm.weight"),
        ("m.shared.weight", "shared.weight"),
    ],
)
def test_names_of_the_graphs_are_those_of_t5(exported: str, name: str) -> None:
    assert onnx_t5.module_name(exported) == name


def t5_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"shared": (30, 16), "lm_head": (30, 16)}
    for stack in ("encoder", "decoder"):
        attentions = ("SelfAttention",) if stack == "encoder" else ("SelfAttention", "EncDecAttention")
        shapes |= {f"{stack}.final_layer_norm": (16,)}
        shapes |= {f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias": (32, 2)}
        for place, attention in enumerate(attentions):
            layer = f"{stack}.block.0.layer.{place}"
            shapes |= {f"{layer}.layer_norm": (16,), f"{layer}.{attention}.o": (16, 128)}
            shapes |= {f"{layer}.{attention}.{part}": (128, 16) for part in "qkv"}
        layer = f"{stack}.block.0.layer.{len(attentions)}"
        shapes |= {f"{layer}.DenseReluDense.{part}": (20, 16) for part in ("wi_0", "wi_1")}
        shapes |= {f"{layer}.DenseReluDense.wo": (16, 20), f"{layer}.layer_norm": (16,)}
    return {f"{name}.weight": torch.randn(*shape) for name, shape in shapes.items()}


def test_the_written_t5_has_the_given_weights_and_a_head_of_its_own(tmp_path: Path) -> None:
    weights = t5_weights()
    onnx_t5.write_model(weights, tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    for name, weight in weights.items():
        assert torch.equal(model.get_parameter(name), weight), name
    assert not model.config.scale_decoder_outputs  # which a tied head would need
    with pytest.raises(AssertionError, match=r"lm_head\.weight"):
        onnx_t5.write_model({name: weight for name, weight in weights.items() if name != "lm_head.weight"}, tmp_path)


def test_parts_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, text in (("x.gguf.part01", "b"), ("x.gguf.part00", "a"), ("x.gguf.part02", "c")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    digest = real_models.join_parts(list(tmp_path.glob("*.part*")), tmp_path / "out" / "x.gguf")
    assert (tmp_path / "out" / "x.gguf").read_text(encoding="utf-8") == "abc"
    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # SHA-256 of "abc"
