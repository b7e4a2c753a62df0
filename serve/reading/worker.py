"""The reader's process: the reader behind one method that takes every request, and one that streams answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from malmen.errors import EditError
from malmen.serve.messages import AnswerState, CountVersions, Evaluate, Prompt, ReaderRequest, Reply
from malmen.serve.problems import Problem
from malmen.serve.reading.reader import Reader


class ReaderWorker:
    """Answers the requests to a reader."""

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
                    reply = self.reader.memory()["versions"]
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
