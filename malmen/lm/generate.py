"""Greedy answers: what a user of the model really reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import GenerationConfig

from malmen.config import DataConfig
from malmen.data.tokens import FactEncoder
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, fact_encoder


@torch.no_grad()
def generate_ids(
    lm: LanguageModel, encoder: FactEncoder, prompts: Sequence[str], max_new_tokens: int | Sequence[int],
    token_budget: int = 4096,
) -> list[list[int]]:  # fmt: skip
    """The greedy continuation of each prompt, in tokens; prompts of one length run together, so none is padded."""
    if lm.kind == "classifier":
        raise EditError("a classifier does not generate text; use `malmen eval` to see its answers")
    news = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    encoded = [encoder.generation_ids(prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    by_length: dict[tuple[int, int], list[int]] = {}
    for index, ids in enumerate(encoded):
        by_length.setdefault((len(ids), news[index]), []).append(index)
    model = cast(Any, lm.model)
    found: dict[int, list[int]] = {}
    for (length, new), indices in by_length.items():
        settings = _greedy(lm, new)
        rows = max(1, token_budget // (length + new))
        for first in range(0, len(indices), rows):
            some = indices[first : first + rows]
            inputs = torch.tensor([encoded[index] for index in some], device=lm.device)
            mask = torch.ones_like(inputs)
            with _own_settings_aside(model):
                outputs = model.generate(inputs, attention_mask=mask, generation_config=settings)
            start = length if lm.kind == "decoder" else 1
            found.update(zip(some, outputs[:, start:].tolist(), strict=True))
    return [found[index] for index in range(len(prompts))]


def _greedy(lm: LanguageModel, max_new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=lm.pad_id,
        eos_token_id=lm.tokenizer.eos_token_id,
        decoder_start_token_id=lm.decoder_start if lm.kind == "encoder-decoder" else None,
    )


@contextmanager
def _own_settings_aside(model: Any) -> Iterator[None]:
    """Instruction-tuned models ship penalties and the like, which would fill in whatever ours leave open."""
    shipped = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = shipped


def up_to_the_end(lm: LanguageModel, ids: Sequence[int]) -> list[int]:
    """Without the end mark and what follows it: padding, where others of a batch went on."""
    ids, end = list(ids), lm.tokenizer.eos_token_id
    return ids[: ids.index(end)] if end in ids else ids


def decode(lm: LanguageModel, ids: Sequence[int]) -> str:
    """Tokens as text, up to the end mark."""
    return str(lm.tokenizer.decode(up_to_the_end(lm, ids), skip_special_tokens=True)).strip()


def ask(
    lm: LanguageModel, prompts: str | Sequence[str], max_new_tokens: int = 24, data: DataConfig | None = None
) -> list[str]:
    """The greedy answer to each prompt as text."""
    encoder = fact_encoder(lm, data or DataConfig())
    listed = [prompts] if isinstance(prompts, str) else prompts
    return [decode(lm, ids) for ids in generate_ids(lm, encoder, listed, max_new_tokens)]
