"""Models of the architectures of the shipped configs: small, but wide and deep enough for these configs' editors."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import VOCABULARY
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from malmen.lm.model import FirstTokenClassifier, LanguageModel

_WIDTH = 128
_GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": _WIDTH, "n_layer": 8, "n_head": 4}
_HIDDEN = {"vocab_size": VOCABULARY, "hidden_size": _WIDTH, "num_hidden_layers": 8, "num_attention_heads": 4}
_T5 = {"d_model": _WIDTH, "d_kv": 16, "d_ff": 2 * _WIDTH, "num_layers": 4, "num_heads": 4, "decoder_start_token_id": 0}
SMALL: dict[str, tuple[Any, Any, str]] = {  # by shipped config
    "gpt2": (GPT2LMHeadModel, GPT2Config(**_GPT), "decoder"),
    "gpt-j": (GPTJForCausalLM, GPTJConfig(**_GPT, rotary_dim=4), "decoder"),
    "t5-xl": (
        T5ForConditionalGeneration,
        T5Config(vocab_size=VOCABULARY, **_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        "encoder-decoder",
    ),
    "bert-base": (
        FirstTokenClassifier,
        BertConfig(**_HIDDEN, intermediate_size=512),
        "classifier",
    ),
    "llama-3-8b": (LlamaForCausalLM, LlamaConfig(**_HIDDEN, intermediate_size=448), "decoder"),
}


def small_lm(name: str) -> LanguageModel:
    """With random weights. Those of most families start so small that hidden states hardly differ: 4 times larger."""
    build, config, kind = SMALL[name]
    torch.manual_seed(0)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 and kind != "encoder-decoder" else 1.0)
    return LanguageModel(model, None, kind)
