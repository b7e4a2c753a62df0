"""An endpoint in this process: the real application over a real writer and reader, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from endpoints import save_editor
from fastapi import FastAPI
from fastapi.testclient import TestClient

from malmen.serve.assembly import build_reader, build_service
from malmen.serve.http.access import SCOPES, load_access, token_of
from malmen.serve.http.api import Backend, make_app
from malmen.serve.ledger.opening import open_ledger
from malmen.serve.messages import (
    AnswerState,
    Change,
    Outcome,
    Prompt,
    ReaderRequest,
    Reply,
    WorkerStatus,
    WriterRequest,
    reply_or_raise,
)
from malmen.serve.reading.reader import ReaderWorker
from malmen.serve.settings import ServeConfig
from malmen.serve.writing.writer import Writer


class OneProcess:
    """The writer and one reader in this process; each change and each prompt is a batch of its own."""

    def __init__(self, settings: ServeConfig) -> None:
        self.service, self.reader = build_service(settings), build_reader(settings)
        self.writer = Writer(self.service, settings, self._apply)
        self.worker = ReaderWorker(self.reader, self._decode)

    async def ask_writer(self, request: WriterRequest[Reply]) -> Reply:
        return reply_or_raise(await self.writer.ask(request))

    async def ask_reader(self, request: ReaderRequest[Reply]) -> Reply:
        return reply_or_raise(await self.worker.ask(request))

    async def stream(self, prompt: Prompt) -> AsyncIterator[AnswerState]:
        async for state in self.worker.stream(prompt):
            yield reply_or_raise(state)

    async def status(self) -> WorkerStatus:
        return WorkerStatus(True, 1, 1, self.reader.versions_in_memory())

    async def _apply(self, change: Change) -> Outcome:
        return (await asyncio.to_thread(self.service.apply, [change]))[0]

    async def _decode(self, prompt: Prompt) -> AsyncIterator[AnswerState]:
        async for (state,) in self.worker.decode_batch([prompt]):
            yield state


class Endpoint:
    """An endpoint in this process, and a client for each scope."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        values = {"editor": str(save_editor(folder / "run")), "store": str(folder / "store"), **settings}
        self.settings = ServeConfig.model_validate(values)
        self.workers = OneProcess(self.settings)
        tokens = folder / "tokens.yaml"
        self.backend = Backend(self.settings, open_ledger(self.settings), load_access(tokens), self.workers)
        self.app: FastAPI = make_app(lambda: self.backend)
        self.tokens = {scope: token_of(tokens, scope) for scope in SCOPES}
        self.clients = {scope: self.client({"Authorization": f"Bearer {self.tokens[scope]}"}) for scope in SCOPES}
        self.admin = self.clients["admin"]

    def client(self, headers: dict[str, str]) -> TestClient:
        return TestClient(self.app, headers=headers, raise_server_exceptions=False)

    def add(self, *facts: dict[str, str], **more: Any) -> dict[str, Any]:
        reply = self.admin.post("/v1/edits", json={"facts": list(facts), **more})
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def complete(self, prompt: str, model: str = "live") -> str:
        reply = self.admin.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 12})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"]).strip()

    def close(self) -> None:
        self.workers.writer.jobs.close()
        self.backend.ledger.close()
