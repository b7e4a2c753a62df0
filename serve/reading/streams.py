"""Answers on their way from the decoding thread to the event loop, and the method that takes every request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from malmen.errors import EditError
from malmen.serve.messages import (
    AnswerState,
    Chat,
    CountVersions,
    Evaluate,
    Prompt,
    ReaderRequest,
    Reply,
    reply_or_raise,
)
from malmen.serve.problems import Problem
from malmen.serve.reading.reader import Reader

log = logging.getLogger(__name__)


class AnswerStream:
    """The states of one answer, put by a decoding thread and awaited on the event loop that created it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[AnswerState | Problem] = asyncio.Queue()
        self._ended = False
        self._decoding: asyncio.Future[Any] | None = None

    def fill_from(self, decoding: asyncio.Future[Any]) -> None:
        """Watch the work that fills this stream: if it fails, the stream ends with a problem."""
        self._decoding = decoding  # the event loop itself keeps no reference
        decoding.add_done_callback(self._on_done)

    def _on_done(self, decoding: asyncio.Future[Any]) -> None:
        error = None if decoding.cancelled() else decoding.exception()
        if error is not None:
            log.error("decoding failed", exc_info=error)
            self._queue.put_nowait(Problem(503, f"decoding failed: {type(error).__name__}"))

    def put(self, state: AnswerState | Problem) -> None:
        """From the decoding thread: the answer as it is now, or why there is none; what follows its end is ignored."""
        if not self._ended:
            self._ended = isinstance(state, Problem) or state.finish_reason is not None
            self._loop.call_soon_threadsafe(self._queue.put_nowait, state)

    async def states(self) -> AsyncIterator[AnswerState]:
        """The answer as it grows, to its end; raises a Problem where there is none."""
        while True:
            state = reply_or_raise(await self._queue.get())
            yield state
            if state.finish_reason is not None:
                return

    async def end(self) -> AnswerState:
        """The finished answer."""
        return [state async for state in self.states()][-1]


class ReaderWorker:
    """Answers the requests to a reader."""

    def __init__(self, reader: Reader, decode: Callable[[tuple[Prompt, AnswerStream]], Awaitable[Any]]) -> None:
        """`decode` fills a prompt's stream by `answer_batch`, with others that arrive at the same time."""
        self.reader, self._decode = reader, decode

    async def ask(self, request: ReaderRequest[Reply]) -> Reply | Problem:
        """The reply to a request, or the problem with it."""
        reply: Any = None
        try:
            match request:
                case Prompt():
                    reply = await self._begin(request).end()
                case Chat():
                    reply = self.reader.chat_text(request)
                case Evaluate():
                    reply = await asyncio.to_thread(self.reader.evaluate, request)
                case CountVersions():
                    reply = self.reader.memory()["versions"]
        except EditError as error:  # what fails in the store is not the caller's fault
            return Problem.of(error, 503)
        return reply

    async def stream(self, prompt: Prompt) -> AsyncIterator[AnswerState | Problem]:
        """The answer as it grows; a problem ends it."""
        try:
            async for state in self._begin(prompt).states():
                yield state
        except Problem as problem:
            yield problem

    def answer_batch(self, prompts: list[tuple[Prompt, AnswerStream]]) -> None:
        """Answer prompts in one batch, each into its stream; called in a thread."""
        streams = [stream for _, stream in prompts]
        try:
            for states in self.reader.answer_states([prompt for prompt, _ in prompts]):
                for stream, state in zip(streams, states, strict=True):
                    stream.put(state)
        except EditError as error:
            for stream in streams:
                stream.put(Problem.of(error, 503))

    def _begin(self, prompt: Prompt) -> AnswerStream:
        self.reader.encode(prompt)  # a prompt that cannot be read is refused before it is decoded with others
        stream = AnswerStream()
        stream.fill_from(asyncio.ensure_future(self._decode((prompt, stream))))
        return stream
