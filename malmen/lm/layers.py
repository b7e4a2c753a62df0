"""Which layers of a language model are edited, and how they are found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from malmen.errors import UsageError

if TYPE_CHECKING:
    from malmen.config import EditorConfig

# How the names of FFN linears end, by family: GPT-2 · GPT-J · Llama and kin · T5 · BERT · GPT-NeoX · OPT
_FFN_NAMES = {
    "first": (
        "mlp.c_fc", "mlp.fc_in", "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "DenseReluDense.wi",
        "DenseReluDense.wi_0", "DenseReluDense.wi_1", "intermediate.dense", "mlp.dense_h_to_4h", "fc1", "mlp.fc1",
    ),
    "second": (
        "mlp.c_proj", "mlp.fc_out", "mlp.down_proj", "DenseReluDense.wo", "output.dense", "mlp.dense_4h_to_h", "fc2",
        "mlp.fc2",
    ),
}  # fmt: skip

# The same of the last linear of a self-attention: GPT-2 · GPT-J and OPT · Llama and kin · GPT-NeoX · T5 · BERT
_ATTENTION_OUT = (
    "attn.c_proj", "attn.out_proj", "self_attn.out_proj", "self_attn.o_proj", "attention.dense", "SelfAttention.o",
    "attention.output.dense",
)  # fmt: skip


@dataclass(frozen=True)
class LayerSpec:
    """A linear layer to edit: its value is W·key."""

    name: str
    key_size: int
    value_size: int
    stack: str = "decoder"  # which of the model's stacks of blocks it stands in
    block: int = 0  # the index of its block in that stack


def find_stacks(model: nn.Module) -> dict[str, str]:
    """The model's stacks of transformer blocks, `encoder` and/or `decoder`, as module names."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1
    ]
    # A block holds several linears and stands in no other block.
    stacks = [
        name
        for name, module in lists
        if sum(is_linear(part) for part in module[0].modules()) >= 3
        and not any(name.startswith(f"{other}.") for other, _ in lists)
    ]
    if len(stacks) == 1:
        return {"decoder": stacks[0]}
    if len(stacks) == 2 and "encoder" in stacks[0] and "decoder" in stacks[1]:
        return {"encoder": stacks[0], "decoder": stacks[1]}
    raise UsageError(
        f"{type(model).__name__} has {len(stacks)} stacks of blocks {stacks}; expected one, or an encoder and a decoder"
    )


def is_linear(module: nn.Module) -> bool:
    """Linear or Conv1D, by type: shapes cannot tell them apart when they are square."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear, whose weight is transposed."""
    from transformers.pytorch_utils import Conv1D  # not at the top: who needs LayerSpec only does not wait for it

    return isinstance(module, Conv1D)


def layer_sizes(module: nn.Module) -> tuple[int, int]:
    """Key and value size; not read from the weight, which may be sharded."""
    if not isinstance(module, nn.Linear):
        return int(module.nx), int(module.nf)  # type: ignore[arg-type]
    return module.in_features, module.out_features


def edited_layers(model: nn.Module, settings: EditorConfig) -> list[LayerSpec]:
    """The layers that an editor with these settings edits."""
    return find_layers(model, settings.layers, settings.ffn, attention=settings.attention)


def find_layers(
    model: nn.Module, layers: str | Sequence[str] = "last:6", ffn: str = "second", *, attention: bool = False
) -> list[LayerSpec]:
    """The layers that a rule (`last:6`, `every:2`, `all`, …) or a list of module names stands for.

    With a rule, `ffn` says which linear of the FFN is meant, and `attention` whether the last linear of the block's
    attention is too; in an encoder-decoder the rule counts in each stack by itself.
    """
    stacks = find_stacks(model)
    if isinstance(layers, str):
        blocks = [
            f"{stack_name}.{block}"
            for stack, stack_name in stacks.items()
            for block in _blocks_of_rule(layers, len(model.get_submodule(stack_name)), stack)  # type: ignore[arg-type]
        ]
        layers = [
            f"{block}.{name}"
            for block in blocks
            for name in _edited_names(model.get_submodule(block), ffn, block, attention=attention)
        ]
    return [_layer(model, stacks, name) for name in layers]


def _blocks_of_rule(rule: str, num_blocks: int, stack: str) -> Sequence[int]:
    match = re.fullmatch(r"(last|first|middle|ends|every):(\d+)|all", rule)
    if match is None:
        rules = "`last:K`, `first:K`, `middle:K`, `ends:K`, `every:K`, `all`"
        raise UsageError(f"unknown layer rule {rule!r}: expected {rules} or a list of module names")
    if rule == "all":
        return range(num_blocks)
    count, most = int(match[2]), num_blocks // 2 if match[1] == "ends" else num_blocks
    if not 1 <= count <= most:
        raise UsageError(f"layer rule {rule!r}: the {stack} has {num_blocks} blocks, so K must be 1 to {most}")
    blocks, before = range(num_blocks), (num_blocks - count) // 2
    return {
        "last": blocks[num_blocks - count :],
        "first": blocks[:count],
        "middle": blocks[before : before + count],
        "ends": [*blocks[:count], *blocks[num_blocks - count :]],
        "every": blocks[::-count][::-1],
    }[match[1]]


def _edited_names(block: nn.Module, ffn: str, block_name: str, *, attention: bool) -> list[str]:
    if ffn not in _FFN_NAMES:
        raise UsageError(f"unknown ffn {ffn!r}: expected `first` or `second`")
    linears = [name for name, module in block.named_modules() if is_linear(module)]

    def known(what: str, ends: Sequence[str], *, in_attention: bool) -> list[str]:
        suffixes = tuple(f".{end}" for end in ends)
        names = [
            name
            for name in linears
            if (in_attention or "attention" not in name.lower()) and f".{name}".endswith(suffixes)
        ]
        if not names:
            raise UsageError(
                f"no {what} is known by name in block {block_name}; give module names instead of a rule; "
                f"its linears are {', '.join(linears)}"
            )
        return names

    last = known("last linear of the attention", _ATTENTION_OUT, in_attention=True) if attention else []
    return last + known(f"{ffn} FFN linear", _FFN_NAMES[ffn], in_attention=False)


def own_token_linears(block: nn.Module) -> list[nn.Module]:
    """The linears of a block whose output no other token of the block reads: those of its FFN and the last one of its
    attention, as far as they are known by name."""
    ends = tuple(f".{end}" for end in (*_FFN_NAMES["first"], *_FFN_NAMES["second"], *_ATTENTION_OUT))
    return [module for name, module in block.named_modules() if is_linear(module) and f".{name}".endswith(ends)]


def _layer(model: nn.Module, stacks: dict[str, str], name: str) -> LayerSpec:
    modules = dict(model.named_modules())
    if name not in modules or not is_linear(modules[name]):
        linears = [other for other, module in modules.items() if is_linear(module)]
        near = difflib.get_close_matches(name, linears, n=3, cutoff=0.0)
        given = f"is a {type(modules[name]).__name__}, not a linear layer" if name in modules else "does not exist"
        raise UsageError(f"layer {name!r} {given}; the nearest linear layers are {', '.join(near)}")
    if re.search(r"EncDecAttention\.[kv]$", name):
        raise UsageError(f"layer {name!r} stands in the decoder but reads the encoder's tokens: it cannot be edited")
    sizes = layer_sizes(modules[name])
    for stack, stack_name in stacks.items():
        if name.startswith(f"{stack_name}."):
            return LayerSpec(name, *sizes, stack=stack, block=int(name[len(stack_name) + 1 :].split(".")[0]))
    raise UsageError(f"layer {name!r} stands outside the blocks of {', '.join(stacks.values())}; only those are edited")
