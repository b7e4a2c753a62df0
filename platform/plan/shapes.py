"""Shapes of well-known models, so that a run of one that is not on this machine can be planned without a network.

The values are those of the models' config.json on the hub, as far as shapes and numbers of operations depend on them.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import nn

from malmen.config import ModelConfig
from malmen.data.tokens import Kind
from malmen.errors import EditError
from malmen.lm.model import load_skeleton


def _gpt2(width: int, blocks: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": blocks, "n_head": heads, "vocab_size": 50257}


def _llama(
    width: int, inner: int, blocks: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool = False, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": blocks,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": 8192, **more,
    }  # fmt: skip


def _t5(width: int, inner: int, blocks: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "t5", "is_encoder_decoder": True, "d_model": width, "d_ff": inner, "d_kv": 64,
        "num_layers": blocks, "num_decoder_layers": blocks, "num_heads": heads, "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip


def _bert(width: int, blocks: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert", "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": blocks,
        "num_attention_heads": heads, "vocab_size": 30522,
    }  # fmt: skip


# By the part of a name that tells them; of several that match the longest is meant.
KNOWN: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "distilgpt2": _gpt2(768, 6, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt-j-6b": _gpt2(4096, 28, 16) | {"model_type": "gptj", "rotary_dim": 64, "vocab_size": 50400},
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, tied=True, head_dim=64),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, tied=True, head_dim=128),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, tied=True),
    "smollm2-360m": _llama(960, 2560, 32, 15, 5, 49152, tied=True),
    "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, tied=True),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32768),
    "t5-v1_1-small": _t5(512, 1024, 8, 6),
    "t5-v1_1-base": _t5(768, 2048, 12, 12),
    "t5-v1_1-large": _t5(1024, 2816, 24, 16),
    "t5-v1_1-xl": _t5(2048, 5120, 24, 32),
    "t5-v1_1-xxl": _t5(4096, 10240, 24, 64),
    "t5-large-ssm": _t5(1024, 2816, 24, 16),
    "t5-xl": _t5(2048, 5120, 24, 32),
    "t5-xxl": _t5(4096, 10240, 24, 64),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
}  # fmt: skip


def known_shape(name: str) -> str | None:
    """The entry of the table that a model's name stands for."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return max((known for known in KNOWN if known in last), key=len, default=None)


@cache
def hidden_size(config: ModelConfig) -> int:
    """The size of a model's hidden states."""
    return int(cast(Any, find_skeleton(config)[0]).config.hidden_size)


def find_skeleton(config: ModelConfig) -> tuple[nn.Module, Kind, str]:
    """The model without weights, and where its shape comes from: this machine, else the table, else the hub.

    The table comes before the hub because an unreachable hub is waited for half a minute.
    """
    here = config.name == "builtin" or Path(config.name).expanduser().exists()
    known = None if here else known_shape(config.name)
    if known is None:
        try:
            return *load_skeleton(config), "on this machine" if here else "from the hub"
        except EditError as error:
            if here:
                raise
            raise EditError(f"{error}; shapes known without it are those of {', '.join(KNOWN)}") from error
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(KNOWN[known]), encoding="utf-8")
        model, kind = load_skeleton(config.model_copy(update={"name": folder, "revision": None}))
    return model, kind, f"not on this machine: the known shape of {known}"
