"""Decoding token by token: prompts of different lengths, versions and samplings in one batch."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from malmen.lm.model import LanguageModel
from malmen.serve.messages import AnswerState, Sampling

# Gives logits (rows, vocabulary) of the next token, and is sent the tokens that were drawn (rows, 1); at first None.
Steps = Generator[Tensor, Any, None]


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
    steps = _decoder_steps(lm, prompts) if lm.kind == "decoder" else _encoder_decoder_steps(lm, prompts)
    seeds = [answer.sampling.seed for answer in answers]
    generators = [None if seed is None else torch.Generator(lm.device).manual_seed(seed) for seed in seeds]
    ids = None
    while any(answer.finish_reason is None for answer in answers):
        with torch.no_grad():
            logits = steps.send(ids)
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


def _decoder_steps(lm: LanguageModel, prompts: Sequence[Sequence[int]]) -> Steps:
    """A decoder's; prompts are padded on the left, so that all answers start in the same column."""
    model, width = cast(Any, lm.model), max(map(len, prompts))
    ids = torch.tensor([[lm.pad_id] * (width - len(row)) + list(row) for row in prompts], device=lm.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=lm.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    known, past = inspect.signature(model.forward).parameters, None
    while True:
        special = {"position_ids": positions, "logits_to_keep": 1}  # some models have no such input
        inputs = {name: value for name, value in special.items() if name in known}
        output = model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True, **inputs)
        past = output.past_key_values
        ids = yield output.logits[:, -1]
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
        # An answer that has ended is decoded on with the others: its position must stay one that the model has.
        positions = (positions[:, -1:] + 1).clamp(max=(lm.max_positions or 2**31) - 1)


def _encoder_decoder_steps(lm: LanguageModel, prompts: Sequence[Sequence[int]]) -> Steps:
    """An encoder-decoder's; the encoder reads the prompts once."""
    model, width = cast(Any, lm.model), max(map(len, prompts))
    rows = torch.tensor([list(row) + [lm.pad_id] * (width - len(row)) for row in prompts], device=lm.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in prompts], device=lm.device)
    inputs = {"encoder_outputs": model.get_encoder()(input_ids=rows, attention_mask=mask), "attention_mask": mask}
    ids, past = torch.full((len(prompts), 1), lm.decoder_start, device=lm.device), None
    while True:
        output = model(decoder_input_ids=ids, past_key_values=past, use_cache=True, **inputs)
        past = output.past_key_values
        ids = yield output.logits[:, -1]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the start of a stop text."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
