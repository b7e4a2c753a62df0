"""A reader: one frozen model that answers as any version would, several versions in one batch."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from malmen.config import Config
from malmen.errors import EditError
from malmen.evaluate import evaluate
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import Overlay, edited_rows
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.messages import AnswerState, CountVersions, Evaluate, Prompt, ReaderRequest, Reply, Sampling, Scores
from malmen.serve.problems import Problem
from malmen.serve.reading.decoding import Answer, decode_batch


class Reader:
    """Reads a version from the store when it is first needed; the last `versions` stay in memory."""

    def __init__(self, lm: LanguageModel, config: Config, blobs: BlobStore, versions: int = 8) -> None:
        self.lm, self.config, self.blobs, self.kept = lm, config, blobs, versions
        self.encoder = fact_encoder(lm, config.data)
        self.verbatim = replace(self.encoder, prompt_format="verbatim")
        self._overlays: OrderedDict[str, Overlay] = OrderedDict()
        self._turn = threading.Lock()  # the model handles one batch at a time

    def overlay(self, shifts: str | None) -> Overlay | None:
        """The edit of a version's blob; None: the unedited model."""
        if shifts is None:
            return None
        if shifts not in self._overlays:
            self._overlays[shifts] = Overlay.of(self.lm, self.blobs.get(shifts))
            while len(self._overlays) > self.kept:
                self._overlays.popitem(last=False)
        self._overlays.move_to_end(shifts)
        return self._overlays[shifts]

    def versions_in_memory(self) -> int:
        """How many."""
        return len(self._overlays)

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens; a Problem where the model cannot read it."""
        text, encoder = prompt.content, self.encoder
        if not isinstance(text, str):
            chat = self._chat_text(text)
            encoder = self.encoder if chat is None else self.verbatim
            text = "\n".join(turn["content"] for turn in text) if chat is None else chat
        try:
            return encoder.generation_ids(text, 1)
        except EditError as error:
            raise Problem(422, str(error)) from error

    def answer_states(self, prompts: Sequence[Prompt]) -> Iterator[list[AnswerState]]:
        """The answers to prompts of any versions, decoded in one batch, after each step."""
        if self.lm.kind == "classifier":
            raise Problem(422, "the model is a classifier and generates no text; use /v1/evaluate")
        order = sorted(range(len(prompts)), key=lambda index: prompts[index].shifts or "")
        encoded = [self.encode(prompt) for prompt in prompts]
        answers = [
            Answer(self.lm, self._fitting(prompt.sampling, len(ids)), len(ids))
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]
        with self._turn:
            runs = groupby(prompts[index].shifts for index in order)
            overlays = [(self.overlay(shifts), len(list(rows))) for shifts, rows in runs]
            with edited_rows(self.lm, overlays):
                for _ in decode_batch(
                    self.lm, [encoded[index] for index in order], [answers[index] for index in order]
                ):
                    yield [answer.state() for answer in answers]

    def _chat_text(self, turns: list[dict[str, str]]) -> str | None:
        """The turns in the form of the tokenizer's chat template; None where it has none."""
        tokenizer = self.lm.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return None
        try:
            return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:  # some know no `system`, or require user and assistant to alternate
            raise Problem(422, f"the model's chat template refuses these messages: {error}") from error

    def evaluate(self, request: Evaluate) -> Scores:
        """ES, GS and LS of records under a version, and each fact before and after."""
        generate = request.generate and self.lm.kind != "classifier"
        with self._turn:
            shifts = self.blobs.get(request.shifts) if request.shifts else {}
            try:
                evaluation = evaluate(self.lm, request.records, shifts, self.config, generate=generate)
            except EditError as error:
                raise Problem(422, str(error)) from error
        return Scores(scores=evaluation.scores(), facts=[asdict(fact) for fact in evaluation.facts])

    def _fitting(self, sampling: Sampling, prompt_tokens: int) -> Sampling:
        """No more new tokens than the model has positions for; the answer then ends with `length`."""
        if self.lm.kind != "decoder":
            return sampling
        room = self.encoder.max_length - prompt_tokens + 1
        return replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))


class ReaderWorker:
    """The reader's process: the reader behind one method that takes every request, and one that streams answers."""

    def __init__(self, reader: Reader, decode: Callable[[Prompt], AsyncIterator[AnswerState]]) -> None:
        """`decode` answers a prompt by `decode_batch`, together with others that arrive at the same time."""
        self.reader, self._decode = reader, decode

    async def ask(self, request: ReaderRequest[Reply]) -> Reply | Problem:
        """The reply to a request, or the problem with it."""
        reply: Any = None
        try:
            match request:
                case Prompt():
                    reply = [state async for state in self._states(request)][-1]
                case Evaluate():
                    reply = await asyncio.to_thread(self.reader.evaluate, request)
                case CountVersions():
                    reply = self.reader.versions_in_memory()
        except EditError as error:  # what fails in the store is not the caller's fault
            return Problem.of(error, 503)
        return reply

    async def stream(self, prompt: Prompt) -> AsyncIterator[AnswerState | Problem]:
        """The answer as it grows; a problem ends it."""
        try:
            async for state in self._states(prompt):
                yield state
        except EditError as error:
            yield Problem.of(error, 503)

    async def decode_batch(self, prompts: Sequence[Prompt]) -> AsyncIterator[list[AnswerState]]:
        """The states of all answers after each step, which runs in a thread.

        The batch has a thread of its own: evaluations that wait for the model may hold all threads of the pool, and
        the batch that they wait for must go on.
        """
        steps, loop = self.reader.answer_states(prompts), asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "decode")
        try:
            while (states := await loop.run_in_executor(thread, next, steps, None)) is not None:
                yield states
        finally:
            thread.shutdown(wait=False)

    async def _states(self, prompt: Prompt) -> AsyncIterator[AnswerState]:
        self.reader.encode(prompt)  # a prompt that cannot be read is refused before it is decoded with others
        async for state in self._decode(prompt):
            yield state
            if state.finish_reason is not None:
                return
