"""Decoding token by token: prompts of different lengths, versions and samplings in one batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from malmen.lm.model import LanguageModel
from malmen.serve.messages import AnswerState, Sampling


@dataclass
class Answer:
    """An answer that grows token by token."""

    lm: LanguageModel
    sampling: Sampling
    prompt_tokens: int
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop or length, once it has ended
    text: str = ""

    def append(self, token: int) -> None:
        """Add the next token; an end token, a stop text or the maximal length ends the answer."""
        if token in end_tokens(self.lm):
            self.finish_reason = "stop"
            return
        self.ids.append(token)
        text = str(self.lm.tokenizer.decode(self.ids, skip_special_tokens=True))
        stops = [text.index(stop) for stop in self.sampling.stop if stop in text]
        if stops:
            self.text, self.finish_reason = text[: min(stops)], "stop"
            return
        if len(self.ids) >= self.sampling.max_tokens:
            self.text, self.finish_reason = text, "length"
        elif not text.endswith("\ufffd"):  # an incomplete character waits for its other bytes
            self.text = text

    def state(self) -> AnswerState:
        """The answer so far, without an end that could still become a stop text."""
        stops = self.sampling.stop if self.finish_reason is None else ()
        held_back = max((_overlap(self.text, stop) for stop in stops), default=0)
        text = self.text[: len(self.text) - held_back]
        return AnswerState(text, self.finish_reason, self.prompt_tokens, len(self.ids))


def decode_batch(lm: LanguageModel, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> Iterator[None]:
    """Grow all answers by one token at each step, until all have ended."""
    steps = _Decoder(lm, prompts) if lm.kind == "decoder" else _EncoderDecoder(lm, prompts)
    seeds = [answer.sampling.seed for answer in answers]
    generators = [None if seed is None else torch.Generator(lm.device).manual_seed(seed) for seed in seeds]
    ids = None
    while any(answer.finish_reason is None for answer in answers):
        with torch.no_grad():
            logits = steps.next(ids)
            tokens = [
                draw(row, answer.sampling, generator)
                for row, answer, generator in zip(logits, answers, generators, strict=True)
            ]
        for answer, token in zip(answers, tokens, strict=True):
            if answer.finish_reason is None:
                answer.append(token)
        ids = torch.tensor(tokens, device=lm.device)[:, None]
        yield


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Draw one token from logits (vocabulary,)."""
    if sampling.temperature < 1e-4:  # smaller ones would overflow; the result is the same
        return int(logits.argmax())
    probabilities = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        ordered[1:][(ordered.cumsum(-1) - ordered)[1:] >= sampling.top_p] = 0  # the first always stays
        probabilities = torch.zeros_like(probabilities).scatter(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def end_tokens(lm: LanguageModel) -> set[int]:
    """The tokens that end an answer: the tokenizer's, and the model's own (a chat's end of turn)."""
    own = getattr(getattr(lm.model, "generation_config", None), "eos_token_id", None)
    tokens = own if isinstance(own, list) else [own]
    return {int(token) for token in (*tokens, lm.tokenizer.eos_token_id) if token is not None}


class _Decoder:
    """A decoder's steps; prompts are padded on the left, so that all answers start in the same column."""

    def __init__(self, lm: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
        self.lm, self.model = lm, cast(Any, lm.model)
        width = max(map(len, prompts))
        rows = [[lm.pad_id] * (width - len(ids)) + list(ids) for ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        self.ids = torch.tensor(rows, device=lm.device)
        self.mask = torch.tensor(mask, device=lm.device)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.past: Any = None
        self.parameters = set(inspect.signature(self.model.forward).parameters)

    def next(self, ids: Tensor | None) -> Tensor:
        """Logits (rows, vocabulary) of the next token, given the ones just drawn (rows, 1)."""
        if ids is not None:
            self.mask = torch.cat((self.mask, torch.ones_like(ids)), dim=1)
            # An answer that has ended is decoded on with the others: its position must stay one that the model has.
            self.positions = (self.positions[:, -1:] + 1).clamp(max=(self.lm.max_positions or 2**31) - 1)
        inputs: dict[str, Any] = {"attention_mask": self.mask, "past_key_values": self.past, "use_cache": True}
        if "position_ids" in self.parameters:
            inputs["position_ids"] = self.positions
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = 1
        output = self.model(input_ids=self.ids if ids is None else ids, **inputs)
        self.past = output.past_key_values
        return cast(Tensor, output.logits[:, -1])


class _EncoderDecoder:
    """An encoder-decoder's steps."""

    def __init__(self, lm: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
        self.lm, self.model = lm, cast(Any, lm.model)
        width = max(map(len, prompts))
        ids = torch.tensor([list(ids) + [lm.pad_id] * (width - len(ids)) for ids in prompts], device=lm.device)
        self.mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in prompts], device=lm.device)
        with torch.no_grad():
            self.encoded = self.model.get_encoder()(input_ids=ids, attention_mask=self.mask)
        self.start = torch.full((len(prompts), 1), lm.decoder_start, device=lm.device)
        self.past: Any = None

    def next(self, ids: Tensor | None) -> Tensor:
        """Logits (rows, vocabulary) of the next token, given the ones just drawn (rows, 1)."""
        output = self.model(
            encoder_outputs=self.encoded,
            attention_mask=self.mask,
            decoder_input_ids=self.start if ids is None else ids,
            past_key_values=self.past,
            use_cache=True,
        )
        self.past = output.past_key_values
        return cast(Tensor, output.logits[:, -1])


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the start of a stop text."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
