"""The writer and the readers, and both in one process without Ray."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jinja2 import TemplateError

from malmen.data.records import EditRecord
from malmen.errors import EditError
from malmen.export import ExportKind
from malmen.serve.exports import export_version
from malmen.serve.http.problems import Problem
from malmen.serve.job_runner import JobRunner
from malmen.serve.materials import make_reader, make_service
from malmen.serve.messages import Change, Outcome, Prompt, unwrapped
from malmen.serve.reading.decoding import Answer
from malmen.serve.reading.reader import Reader
from malmen.serve.reading.streams import Growing
from malmen.serve.settings import ServeConfig

log = logging.getLogger(__name__)


class Writer:
    """The service with its jobs; `apply` is for one caller at a time."""

    def __init__(self, settings: ServeConfig) -> None:
        self.settings, self.service = settings, make_service(settings)
        self.jobs = JobRunner(self.service)
        self.exporting = threading.Lock()  # one at a time: it may take gigabytes, and two would write the same folder

    def apply(self, changes: Sequence[Change]) -> list[Outcome]:
        """One solve for all of these, where their contents allow it."""
        return self.service.apply(changes)

    def export(self, version: str, kind: ExportKind, max_rank: int) -> Outcome:
        """An export's manifest, or what is wrong."""
        name = self.settings.model or self.service.editor.config.model.name
        if not self.exporting.acquire(blocking=False):  # who waited would take a thread from the edits
            return Problem(429, "another export is being written; ask again", retry_after=10)
        try:
            return export_version(self.service, version, kind, max_rank, self.settings.store, name)
        except Problem as problem:
            return problem
        finally:
            self.exporting.release()


class Answering:
    """A reader for several callers at once: what they ask together is decoded together."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self._turn = reader, threading.Lock()

    def answer(self, asked: Sequence[tuple[Prompt, Any]]) -> None:
        """Answer prompts in one batch; each comes with a queue, which is given the growing answer and its end."""

        def tell(answers: list[Answer]) -> None:
            for (_, queue), answer in zip(asked, answers, strict=True):
                queue.put(answer)

        try:
            with self._turn:
                tell(self.reader.answer([prompt for prompt, _ in asked], tell))
        except EditError as error:
            for _, queue in asked:
                queue.fail(as_problem(error))

    def evaluate(self, records: Sequence[EditRecord], shifts: str | None, generate: bool) -> Outcome:
        """ES, GS, LS, or what is wrong."""
        try:
            with self._turn:
                return self.reader.evaluate(records, shifts, generate)
        except EditError as error:
            return as_problem(error)

    def chat_text(self, turns: list[dict[str, str]]) -> Outcome:
        """By the tokenizer's chat template, if it takes these turns: some know no `system`, or want them to alternate.

        A model without one reads the turns' texts, one below the other.
        """
        tokenizer = self.reader.lm.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return {"text": "\n".join(turn["content"] for turn in turns), "verbatim": False}
        try:
            text = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:
            return Problem(422, f"the model's chat template refuses these messages: {error}")
        return {"text": text, "verbatim": True}


class OneProcess:
    """All roles in this process, without Ray."""

    def __init__(self, settings: ServeConfig) -> None:
        self.writer, self.answering = Writer(settings), Answering(make_reader(settings))

    async def edit(self, change: Change) -> dict[str, Any]:
        return unwrapped((await asyncio.to_thread(self.writer.apply, [change]))[0])

    async def wake(self) -> None:
        self.writer.jobs.wake()

    async def export(self, version: str, kind: ExportKind, max_rank: int) -> dict[str, Any]:
        return unwrapped(await asyncio.to_thread(self.writer.export, version, kind, max_rank))

    async def complete(self, prompt: Prompt) -> dict[str, Any]:
        self.answering.reader.encode(prompt)
        growing = Growing()
        growing.filled_by(asyncio.ensure_future(asyncio.to_thread(self.answering.answer, [(prompt, growing)])))
        return await growing.end()

    async def stream(self, prompt: Prompt) -> AsyncIterator[dict[str, Any]]:
        self.answering.reader.encode(prompt)
        growing = Growing()
        growing.filled_by(asyncio.ensure_future(asyncio.to_thread(self.answering.answer, [(prompt, growing)])))
        async for state in growing.states():
            yield state

    async def chat_text(self, turns: list[dict[str, str]]) -> dict[str, Any]:
        return unwrapped(self.answering.chat_text(turns))

    async def evaluate(self, records: Sequence[EditRecord], shifts: str | None, generate: bool) -> dict[str, Any]:
        return unwrapped(await asyncio.to_thread(self.answering.evaluate, records, shifts, generate))

    async def status(self) -> dict[str, Any]:
        return {
            "writer": {"alive": True, "waiting": 0},
            "readers": {"replicas": 1, "running": 1},
            "versions_in_memory": self.answering.reader.memory()["versions"],
        }

    def close(self) -> None:
        """Stop the jobs."""
        self.writer.jobs.close()


def as_problem(error: EditError) -> Problem:
    """What is wrong with the store is the endpoint's trouble, not the caller's."""
    return error if isinstance(error, Problem) else Problem(503, str(error))
