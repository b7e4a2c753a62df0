"""Tiny models of every supported kind, built from config in float64, and facts in their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BertConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from malmen.config import Config
from malmen.data.tokens import EncodedFact
from malmen.editor import Editor
from malmen.lm.layers import edited_layers
from malmen.lm.model import FirstTokenClassifier, LanguageModel

VOCABULARY = 40
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "head_dim": 6,
}


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=12, n_layer=3, n_head=2))


def _gptj() -> GPTJForCausalLM:
    return GPTJForCausalLM(
        GPTJConfig(vocab_size=VOCABULARY, n_positions=32, n_embd=12, n_layer=3, n_head=2, rotary_dim=4)
    )


def _opt() -> OPTForCausalLM:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            word_embed_proj_dim=12,
            ffn_dim=20,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )


def _t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=12,
            d_kv=6,
            d_ff=20,
            num_layers=3,
            num_heads=2,
            decoder_start_token_id=0,
            feed_forward_proj="gated-gelu",
        )
    )


def _bert() -> FirstTokenClassifier:
    return FirstTokenClassifier(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )


MODELS: dict[str, tuple[Any, str]] = {
    "gpt2": (_gpt2, "decoder"),
    "gptj": (_gptj, "decoder"),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA)), "decoder"),
    "t5": (_t5, "encoder-decoder"),
    "bert": (_bert, "classifier"),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**_LLAMA)), "decoder"),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**_LLAMA)), "decoder"),
    "opt": (_opt, "decoder"),  # its FFN sees the tokens of all facts in one row
}
KINDS = ("gpt2", "gptj", "llama", "t5", "bert")  # one of each kind of LM


def tiny_lm(name: str) -> LanguageModel:
    torch.manual_seed(0)
    build, kind = MODELS[name]
    model = build().double()
    with torch.no_grad():  # large enough that attention and FFN matter
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return LanguageModel(model, None, kind)


def random_facts(lm: LanguageModel, number: int, seed: int = 1, max_answer: int = 3) -> list[EncodedFact]:
    """Prompts and answers of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    facts = []
    for _ in range(number):
        prompt = [draw(1, VOCABULARY - 1) for _ in range(draw(2, 7))]
        answer = [draw(1, VOCABULARY - 1) for _ in range(draw(1, max_answer))]
        if lm.kind == "decoder":
            facts.append(EncodedFact(prompt + answer[:-1], len(prompt) - 1, answer))
        elif lm.kind == "classifier":
            facts.append(EncodedFact(prompt, 0, [draw(0, 1)]))
        else:
            facts.append(EncodedFact([0, *answer[:-1]], 0, answer, prompt))
    return facts


@dataclass
class Setup:
    lm: LanguageModel
    editor: Editor


def make_setup(
    name: str,
    *,
    layers: Any = "last:2",
    budget: int = 10_000,
    rows: int = 10_000,
    training: dict[str, Any] | None = None,
    **editor: Any,
) -> Setup:
    """A tiny model and a float64 editor whose every parameter is away from its special start."""
    settings = {"layers": layers, "rank": 5, "edit_lr": 0.05, "damping": 0.3, "parametrisation": "relative", **editor}
    config = Config.model_validate(
        {
            "editor": settings,
            "batch": {"token_budget": budget, "hypernet_rows": rows},
            "training": {"locality_coef": 0.7, **(training or {})},
        }
    )
    lm = tiny_lm(name)
    torch.manual_seed(2)
    net = Editor(edited_layers(lm.model, config.editor), config).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if config.editor.preserving:
        for layer in net.layers:
            shape = len(config.editor.preserved_terms), 2 * layer.key_size, layer.key_size
            keys = torch.randn(*shape, dtype=torch.float64)
            net.preserve({layer.name: keys.mT @ keys / shape[1]})
    return Setup(lm, net)
