"""Greedy answers: the text that a user of the model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, overload

import torch
from transformers import GenerationConfig

from malmen.config import DataConfig
from malmen.data.tokens import FactEncoder
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, fact_encoder

OnProgress = Callable[[int, int], None]  # called with how many are done, and of how many


def part_of(on_progress: OnProgress | None, part: int, parts: int) -> OnProgress | None:
    """The progress of one of several equal parts, as progress of them all."""
    return on_progress and (lambda done, total: on_progress(part * total + done, parts * total))


@torch.no_grad()
def generate_ids(
    lm: LanguageModel, encoder: FactEncoder, prompts: Sequence[str], max_new_tokens: int | Sequence[int],
    token_budget: int = 4096, on_progress: OnProgress | None = None,
) -> list[list[int]]:  # fmt: skip
    """The greedy continuation of each prompt, in at most `max_new_tokens` tokens (one limit for all, or one each).

    Prompts of one length run together, so none is padded. `on_progress` counts prompts.
    """
    if lm.kind == "classifier":
        raise EditError("a classifier does not generate text; use `malmen eval` to see its answers")
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    encoded = [encoder.generation_ids(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    return continue_prompts(lm, encoded, limits, token_budget, on_progress)


def continue_prompts(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], limits: Sequence[int], token_budget: int = 4096,
    on_progress: OnProgress | None = None, *, must_say: bool = False,
) -> list[list[int]]:  # fmt: skip
    """The same of prompts in tokens, in at most `limits` tokens each. With `must_say` no text ends before its limit."""
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(prompts):
        by_length.setdefault(len(ids), []).append(index)
    continuations: dict[int, list[int]] = {}
    for length, indices in by_length.items():
        limit = max(limits[index] for index in indices)
        batch_size = max(1, token_budget // (length + limit))
        for first in range(0, len(indices), batch_size):
            batch = indices[first : first + batch_size]
            rows = continue_rows(lm, [prompts[index] for index in batch], limit, must_say=must_say)
            for index, ids in zip(batch, rows, strict=True):
                continuations[index] = ids[: limits[index]]
            if on_progress:
                on_progress(len(continuations), len(prompts))
    return [continuations[index] for index in range(len(prompts))]


@torch.no_grad()
def continue_rows(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, sampled: bool = False,
    must_say: bool = False,
) -> list[list[int]]:  # fmt: skip
    """What follows these prompts: the most probable tokens, or tokens drawn at temperature 1. With `must_say` the end
    mark is never chosen.

    Shorter prompts are padded, which may change a token where two are equally probable but for rounding.
    """
    longest = max(map(len, prompts))
    pads = [[0] * (longest - len(prompt)) for prompt in prompts]
    ones = [[1] * len(prompt) for prompt in prompts]
    left = lm.kind == "decoder"  # which goes on at the right

    def padded(rows: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
        sides = [([pad] * len(some), list(row)) for some, row in zip(pads, rows, strict=True)]
        return torch.tensor([some + row if left else row + some for some, row in sides], device=lm.device)

    inputs, mask = padded(prompts, lm.pad_id), padded(ones, 0)
    with _settings(lm, max_new_tokens, sampled, must_say) as settings:
        outputs = cast(Any, lm.model).generate(inputs, attention_mask=mask, generation_config=settings)
    rows: list[list[int]] = outputs[:, inputs.shape[1] if lm.kind == "decoder" else 1 :].tolist()
    return rows


@contextmanager
def _settings(lm: LanguageModel, max_new_tokens: int, sampled: bool, must_say: bool) -> Iterator[GenerationConfig]:
    """The settings to generate with. Inside, the model has none of its own: instruction-tuned models ship penalties and
    the like, which would apply wherever ours leave a setting open."""
    model = cast(Any, lm.model)
    shipped, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield GenerationConfig(
            do_sample=sampled,
            top_k=0 if sampled else None,
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens if must_say else None,
            pad_token_id=lm.pad_id,
            eos_token_id=lm.tokenizer.eos_token_id,
            decoder_start_token_id=lm.decoder_start if lm.kind == "encoder-decoder" else None,
        )
    finally:
        model.generation_config = shipped


def up_to_the_end(lm: LanguageModel, ids: Sequence[int]) -> list[int]:
    """The tokens before the end mark. What follows it is padding: other rows of the batch were longer."""
    ids, end = list(ids), lm.tokenizer.eos_token_id
    return ids[: ids.index(end)] if end in ids else ids


def decode(lm: LanguageModel, ids: Sequence[int]) -> str:
    """Tokens as text, up to the end mark."""
    return str(lm.tokenizer.decode(up_to_the_end(lm, ids), skip_special_tokens=True)).strip()


@overload
def ask(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
    lm: LanguageModel, prompts: str, max_new_tokens: int = ..., data: DataConfig | None = ...
) -> str: ...
@overload
def ask(
    lm: LanguageModel, prompts: Sequence[str], max_new_tokens: int = ..., data: DataConfig | None = ...
) -> list[str]: ...
def ask(
    lm: LanguageModel, prompts: str | Sequence[str], max_new_tokens: int = 24, data: DataConfig | None = None
) -> str | list[str]:
    """The model's greedy answer as text: one string for one prompt, a list for several."""
    if isinstance(prompts, str):
        return ask(lm, [prompts], max_new_tokens, data)[0]
    encoder = fact_encoder(lm, data or DataConfig())
    return [decode(lm, ids) for ids in generate_ids(lm, encoder, prompts, max_new_tokens)]
