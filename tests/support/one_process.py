"""An endpoint in this process: the real application over real roles, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from endpoints import save_editor
from fastapi import FastAPI
from fastapi.testclient import TestClient

from malmen.serve.http.access import ROLES, load_access, token_of
from malmen.serve.http.api import Backend, make_app
from malmen.serve.ledger.opening import open_ledger
from malmen.serve.settings import ServeConfig
from malmen.serve.workers import OneProcess


class Endpoint:
    """An endpoint in this process, and a client for each role."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        values = {"editor": str(save_editor(folder / "run")), "store": str(folder / "store"), **settings}
        self.settings = ServeConfig.model_validate(values)
        self.roles = OneProcess(self.settings)
        tokens = folder / "tokens.yaml"
        self.backend = Backend(self.settings, open_ledger(self.settings), load_access(tokens), self.roles)
        self.app: FastAPI = make_app(lambda: self.backend)
        self.tokens = {role: token_of(tokens, role) for role in ROLES}
        self.clients = {role: self.client({"Authorization": f"Bearer {self.tokens[role]}"}) for role in ROLES}
        self.admin = self.clients["admin"]

    def client(self, headers: dict[str, str]) -> TestClient:
        return TestClient(self.app, headers=headers, raise_server_exceptions=False)

    def add(self, *facts: dict[str, str], **more: Any) -> dict[str, Any]:
        reply = self.admin.post("/v1/edits", json={"facts": list(facts), **more})
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def say(self, prompt: str, model: str = "live") -> str:
        reply = self.admin.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 12})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"]).strip()

    def close(self) -> None:
        self.roles.close()
        self.backend.ledger.close()
