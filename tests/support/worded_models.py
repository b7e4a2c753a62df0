"""Tiny decoders with random weights in float64 that read the built-in world's words."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from malmen.data.world import WORLD_MODEL
from malmen.lm.model import LanguageModel

DECODERS = ("gpt2", "gptj", "llama", "opt")


def worded_lm(name: str = "gpt2") -> LanguageModel:
    """A random one, the same each time."""
    tokenizer = AutoTokenizer.from_pretrained(WORLD_MODEL)
    size = len(tokenizer)
    makers: dict[str, Any] = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=64, n_embd=12, n_layer=4, n_head=2)),
        "gptj": lambda: GPTJForCausalLM(
            GPTJConfig(vocab_size=size, n_positions=64, n_embd=12, n_layer=4, n_head=2, rotary_dim=4)
        ),
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(vocab_size=size, hidden_size=12, intermediate_size=20, num_hidden_layers=4,
                        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
        ),
        "opt": lambda: OPTForCausalLM(
            OPTConfig(vocab_size=size, hidden_size=12, word_embed_proj_dim=12, ffn_dim=48, num_hidden_layers=4,
                      num_attention_heads=2, max_position_embeddings=64)
        ),
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = makers[name]()
    return LanguageModel(model.double(), tokenizer, "decoder")
