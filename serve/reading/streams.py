"""Answers on their way from the thread that decodes them to those who wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from malmen.serve.http.problems import Problem

if TYPE_CHECKING:
    from malmen.serve.reading.decoding import Answer

log = logging.getLogger(__name__)


class Growing:
    """An answer on its way from the decoding thread to the caller's event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[dict[str, Any] | Problem] = asyncio.Queue()
        self._ended = False
        self._work: asyncio.Future[Any] | None = None

    def filled_by(self, work: asyncio.Future[Any]) -> None:
        """What decodes it; kept, so that it is not forgotten, and watched: if it fails, nobody waits for ever."""
        self._work = work
        work.add_done_callback(self._see)

    def _see(self, work: asyncio.Future[Any]) -> None:
        error = None if work.cancelled() else work.exception()
        if error is not None:
            log.error("decoding failed", exc_info=error)
            self._queue.put_nowait(Problem(503, f"decoding failed: {type(error).__name__}"))

    def put(self, answer: Answer) -> None:
        """From the decoding thread: the answer as it is now; its end is told at once, and once."""
        if not self._ended:
            self._ended = answer.finish_reason is not None
            self._loop.call_soon_threadsafe(self._queue.put_nowait, told(answer))

    def fail(self, problem: Problem) -> None:
        """From the decoding thread: there will be no answer."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, problem)

    async def states(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as it grows, to its end."""
        while True:
            found = await self._queue.get()
            if isinstance(found, Problem):
                raise found
            yield found
            if found["finish_reason"] is not None:
                return

    async def end(self) -> dict[str, Any]:
        """The whole answer."""
        return [state async for state in self.states()][-1]


def told(answer: Answer) -> dict[str, Any]:
    """Plain values, which travel between processes."""
    return {
        "text": answer.settled(),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.ids),
    }
