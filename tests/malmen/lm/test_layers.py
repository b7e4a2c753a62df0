from __future__ import annotations

import pytest
from tiny_models import tiny_lm
from torch import nn

from malmen.errors import UsageError
from malmen.lm.layers import _blocks_of_rule, find_layers, find_stacks


@pytest.mark.parametrize(
    ("name", "rule", "ffn", "expected"),
    [
        ("gpt2", "last:2", "second", ["transformer.h.1.mlp.c_proj", "transformer.h.2.mlp.c_proj"]),
        ("gpt2", "first:1", "first", ["transformer.h.0.mlp.c_fc"]),
        ("gptj", "last:1", "second", ["transformer.h.2.mlp.fc_out"]),
        ("llama", "last:1", "second", ["model.layers.2.mlp.down_proj"]),
        ("llama", "last:1", "first", ["model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj"]),
        ("opt", "last:1", "second", ["model.decoder.layers.2.fc2"]),
        ("opt", "last:1", "first", ["model.decoder.layers.2.fc1"]),
        ("bert", "last:1", "second", ["bert.encoder.layer.2.output.dense"]),
        ("bert", "last:1", "first", ["bert.encoder.layer.2.intermediate.dense"]),
        (
            "t5",
            "last:1",
            "second",
            ["encoder.block.2.layer.1.DenseReluDense.wo", "decoder.block.2.layer.2.DenseReluDense.wo"],
        ),
    ],
)
def test_a_rule_finds_the_ffn_linears(name: str, rule: str, ffn: str, expected: list[str]) -> None:
    assert [layer.name for layer in find_layers(tiny_lm(name).model, rule, ffn)] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", ["transformer.h.2.attn.c_proj"]),
        ("gptj", ["transformer.h.2.attn.out_proj"]),
        ("llama", ["model.layers.2.self_attn.o_proj"]),
        ("opt", ["model.decoder.layers.2.self_attn.out_proj"]),
        ("bert", ["bert.encoder.layer.2.attention.output.dense"]),
        ("t5", ["encoder.block.2.layer.0.SelfAttention.o", "decoder.block.2.layer.0.SelfAttention.o"]),
    ],
)
def test_a_rule_finds_the_last_linear_of_the_attention_too(name: str, expected: list[str]) -> None:
    model = tiny_lm(name).model
    with_attention = [layer.name for layer in find_layers(model, "last:1", attention=True)]
    ffn = [layer.name for layer in find_layers(model, "last:1")]
    assert sorted(with_attention) == sorted(expected + ffn)


@pytest.mark.parametrize(
    ("rule", "blocks", "expected"),
    [
        ("last:2", 7, [5, 6]),
        ("first:3", 7, [0, 1, 2]),
        ("middle:3", 7, [2, 3, 4]),
        ("middle:2", 7, [2, 3]),
        ("ends:2", 7, [0, 1, 5, 6]),
        ("ends:3", 6, [0, 1, 2, 3, 4, 5]),
        ("every:2", 7, [0, 2, 4, 6]),
        ("every:2", 6, [1, 3, 5]),
        ("every:4", 6, [1, 5]),
        ("all", 3, [0, 1, 2]),
    ],
)
def test_a_rule_means_these_blocks(rule: str, blocks: int, expected: list[int]) -> None:
    assert list(_blocks_of_rule(rule, blocks, "decoder")) == expected


def test_the_ends_must_not_meet() -> None:
    with pytest.raises(UsageError, match="has 7 blocks, so K must be 1 to 3"):
        _blocks_of_rule("ends:4", 7, "decoder")


def test_sizes_and_places_are_read_by_type() -> None:
    (conv,) = find_layers(tiny_lm("gpt2").model, ["transformer.h.1.mlp.c_proj"])
    assert (conv.key_size, conv.value_size, conv.block, conv.stack) == (48, 12, 1, "decoder")
    (linear,) = find_layers(tiny_lm("t5").model, ["encoder.block.0.layer.1.DenseReluDense.wi_0"])
    assert (linear.key_size, linear.value_size, linear.block, linear.stack) == (12, 20, 0, "encoder")


def test_a_wrong_name_lists_the_nearest_right_ones() -> None:
    with pytest.raises(UsageError, match=r"transformer\.h\.1\.mlp\.c_proj"):
        find_layers(tiny_lm("gpt2").model, ["transformer.h.1.mlp.cproj"])
    with pytest.raises(UsageError, match="is a GPT2MLP, not a linear layer"):
        find_layers(tiny_lm("gpt2").model, ["transformer.h.1.mlp"])
    with pytest.raises(UsageError, match="outside the blocks"):
        find_layers(tiny_lm("gpt2").model, ["lm_head"])


@pytest.mark.parametrize("rule", ["last:0", "last:4", "lats:2", "6", "last:x"])
def test_a_wrong_rule_says_what_is_possible(rule: str) -> None:
    with pytest.raises(UsageError, match=r"3 blocks|expected `last:K`"):
        find_layers(tiny_lm("gpt2").model, rule)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="0 stacks"):
        find_stacks(nn.Linear(2, 2))
