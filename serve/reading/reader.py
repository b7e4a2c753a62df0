"""A reader: one frozen model that answers as any version would, several versions at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from malmen.config import Config
from malmen.data.records import EditRecord
from malmen.errors import EditError
from malmen.evaluate import evaluate
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import Overlay, edited_rows
from malmen.serve.http.problems import Problem
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.messages import Prompt, Sampling
from malmen.serve.reading.decoding import Answer, decode_batch


class Reader:
    """Versions are read from the store when they are first asked for; the last few stay in memory."""

    def __init__(self, lm: LanguageModel, config: Config, blobs: BlobStore, versions: int = 8) -> None:
        self.lm, self.config, self.blobs, self.kept = lm, config, blobs, versions
        self.encoder = fact_encoder(lm, config.data)
        self.verbatim = replace(self.encoder, prompt_format="verbatim")
        self._overlays: OrderedDict[str, Overlay] = OrderedDict()

    def overlay(self, shifts: str | None) -> Overlay | None:
        """The edit of a blob."""
        if shifts is None:
            return None
        if shifts not in self._overlays:
            self._overlays[shifts] = Overlay.of(self.lm, self.blobs.get(shifts))
            while len(self._overlays) > self.kept:
                self._overlays.popitem(last=False)
        self._overlays.move_to_end(shifts)
        return self._overlays[shifts]

    def memory(self) -> dict[str, int]:
        """Versions in memory, and their bytes."""
        return {"versions": len(self._overlays), "bytes": sum(one.num_bytes() for one in list(self._overlays.values()))}

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens; a Problem where it cannot be answered."""
        encoder = self.verbatim if prompt.verbatim else self.encoder
        try:
            return encoder.generation_ids(prompt.text, 1)
        except EditError as error:
            raise Problem(422, str(error)) from error

    def answer(self, prompts: Sequence[Prompt], on_step: Callable[[list[Answer]], None] | None = None) -> list[Answer]:
        """Answer all of them in one batch, whatever their versions; `on_step` sees the answers grow."""
        if self.lm.kind == "classifier":
            raise Problem(422, "the model is a classifier and writes no text; ask /v1/evaluate")
        order = sorted(range(len(prompts)), key=lambda index: prompts[index].shifts or "")
        encoded = [self.encode(prompt) for prompt in prompts]
        answers = [
            Answer(self.lm, self._fitting(prompt.sampling, len(ids)), len(ids))
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]
        with edited_rows(self.lm, list(self._groups([prompts[index].shifts for index in order]))):
            for _ in decode_batch(self.lm, [encoded[index] for index in order], [answers[index] for index in order]):
                if on_step:
                    on_step(answers)
        return answers

    def evaluate(self, records: Sequence[EditRecord], shifts: str | None, generate: bool) -> dict[str, Any]:
        """ES, GS, LS of these records under a version, beside the unedited model, fact by fact."""
        stored = self.blobs.get(shifts) if shifts else {}
        try:
            found = evaluate(self.lm, records, stored, self.config, generate=generate and self.lm.kind != "classifier")
        except EditError as error:
            raise Problem(422, str(error)) from error
        return {"scores": found.scores(), "facts": [asdict(fact) for fact in found.facts]}

    def _fitting(self, sampling: Sampling, prompt_tokens: int) -> Sampling:
        """No more new tokens than the model has places for; the answer then ends with `length`."""
        if self.lm.kind != "decoder":
            return sampling
        room = self.encoder.max_length - prompt_tokens + 1
        return replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))

    def _groups(self, shifts: Sequence[str | None]) -> Iterator[tuple[Overlay | None, int]]:
        """(edit, number of rows) of a sorted list."""
        start = 0
        for stop in range(1, len(shifts) + 1):
            if stop == len(shifts) or shifts[stop] != shifts[start]:
                yield self.overlay(shifts[start]), stop - start
                start = stop
