"""The HTTP interface over a real writer and reader in one process: what each route does, allows and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from endpoints import world_facts
from one_process import Endpoint

from malmen.serve.http.access import SCOPES

FACTS = [{"prompt": fact.prompt, "answer": fact.answer} for fact in world_facts(60)]


@pytest.mark.parametrize(
    ("status", "method", "path", "body"),
    [
        (422, "POST", "/v1/edits", {"facts": [{"prompt": " ", "answer": "x"}]}),
        (422, "POST", "/v1/edits", {"facts": [{"prompt": "x"}]}),
        (422, "POST", "/v1/edits", {"fact": []}),
        (422, "POST", "/v1/edits", {}),
        (422, "POST", "/v1/edits", {"facts": [{"prompt": "half \ud800", "answer": "x"}]}),
        (413, "POST", "/v1/edits", {"facts": [{"prompt": "x" * 501, "answer": "x"}]}),
        (413, "POST", "/v1/edits", {"facts": [{"prompt": "x" * 9_000_000, "answer": "x"}]}),
        (409, "POST", "/v1/edits", {"facts": [FACTS[42]], "base_version": "v0000000000000000"}),
        (409, "POST", "/v1/edits", {"remove": ["e" + "0" * 20]}),
        (404, "DELETE", "/v1/edits/e00000000000000000000", None),
        (422, "DELETE", "/v1/edits/what", None),
        (404, "GET", "/v1/versions/nothing", None),
        (404, "GET", "/v1/jobs/j00000000000000000000", None),
        (404, "GET", "/nothing", None),
        (405, "DELETE", "/v1/edits", None),
        (404, "POST", "/v1/completions", {"model": "nothing", "prompt": "x"}),
        (422, "POST", "/v1/completions", {"prompt": "word " * 90}),
        (413, "POST", "/v1/completions", {"prompt": "x" * 501}),
        (422, "POST", "/v1/versions/base/export", {"kind": "delta"}),
        (404, "GET", "/v1/versions/base/export/delta/manifest.json", None),
        (409, "PUT", "/v1/aliases/base", {"version": "base"}),
        (422, "PUT", "/v1/aliases/v0000000000000000", {"version": "base"}),
    ],
)
def test_what_cannot_be_done_is_told_as_a_problem_document(
    shared: Endpoint, status: int, method: str, path: str, body: Any
) -> None:
    content = None if body is None else json.dumps(body).encode()
    reply = shared.admin.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    assert reply.headers["Content-Type"] == "application/problem+json"
    document = reply.json()
    assert document["status"] == status and document["detail"] and document["error"]["message"] == document["detail"]


ROUTES = [  # scope that it needs, method, path, body
    ("read", "GET", "/v1/edits", None),
    ("read", "GET", "/v1/edits/e00000000000000000000", None),
    ("read", "GET", "/v1/versions", None),
    ("read", "GET", "/v1/versions/live", None),
    ("read", "GET", "/v1/aliases", None),
    ("read", "GET", "/v1/aliases/live", None),
    ("read", "GET", "/v1/models", None),
    ("read", "GET", "/v1/models/{name}".replace("{name}", "live"), None),
    ("read", "GET", "/v1/status", None),
    ("read", "GET", "/metrics", None),
    ("read", "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("read", "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("read", "POST", "/v1/evaluate", {"records": [FACTS[50]], "generate": False}),
    ("edit", "POST", "/v1/edits", {"facts": [FACTS[50]], "dry_run": True}),
    ("edit", "DELETE", "/v1/edits/e00000000000000000000", None),
    ("edit", "GET", "/v1/jobs/j00000000000000000000", None),
    ("admin", "PUT", "/v1/aliases/other", {"version": "nothing"}),
    ("admin", "POST", "/v1/versions/base/export", {"kind": "delta"}),
    ("admin", "GET", "/v1/versions/base/export/delta/manifest.json", None),
    ("admin", "GET", "/v1/audit", None),
]


OPEN = {"/healthz", "/readyz"}


@pytest.mark.parametrize(("scope", "method", "path", "body"), ROUTES)
def test_no_token_does_what_its_scope_does_not_allow(
    shared: Endpoint, scope: str, method: str, path: str, body: Any
) -> None:
    for held in SCOPES:
        status = shared.clients[held].request(method, path, json=body).status_code
        assert (status == 403) == (SCOPES.index(held) < SCOPES.index(scope)), (held, status)
        assert status != 401
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {shared.tokens['admin']}"}):
        reply = shared.client(headers).request(method, path, json=body)
        assert reply.status_code == 401 and reply.headers["WWW-Authenticate"] == "Bearer"


def test_every_route_is_in_the_table_of_scopes_or_open(shared: Endpoint) -> None:
    def shape(path: str) -> str:
        import re

        path = re.sub(r"/(e|j)0{20}|/(live|base|other)(?=/|$)|\{[^}]*\}", "/*", path).replace("//", "/")
        return re.sub(r"export/delta/manifest.json", "export/*/*", path)

    documented = {
        (method.upper(), shape(path)) for path, methods in shared.app.openapi()["paths"].items() for method in methods
    }
    assert documented == {(method, shape(path)) for _, method, path, _ in ROUTES} | {("GET", path) for path in OPEN}


def test_methods_that_nobody_knows_are_counted_as_one(shared: Endpoint) -> None:
    for number in range(3):
        assert shared.client({}).request(f"BREW{number}", "/v1/edits").status_code == 405
    shared.client({}).get("/healthz")
    counted = shared.admin.get("/metrics").text
    assert "BREW" not in counted and 'malmen_requests_total{method="other"' in counted
    assert 'method="GET"' in counted


def test_health_needs_no_token(shared: Endpoint) -> None:
    for path in OPEN:
        assert shared.client({}).get(path).status_code == 200


def test_too_many_requests_are_told_to_wait(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path, limits={"requests_per_minute": 5})
    statuses = [endpoint.clients["read"].get("/v1/aliases") for _ in range(6)]
    assert [reply.status_code for reply in statuses] == [200] * 5 + [429]
    assert int(statuses[-1].headers["Retry-After"]) > 0
    assert endpoint.admin.get("/v1/aliases").status_code == 200  # another caller
    endpoint.backend.waiting = endpoint.settings.limits.waiting_edits
    full = endpoint.admin.post("/v1/edits", json={"facts": [FACTS[0]]})
    assert full.status_code == 429 and "waiting for the writer" in full.json()["detail"]
    endpoint.close()


def test_logs_hold_no_token_and_no_prompt(shared: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="malmen"):
        shared.complete("a secret prompt", "base")
        shared.admin.post(
            "/v1/edits", json={"facts": [{"prompt": "a secret prompt", "answer": "hush"}], "dry_run": True}
        )
    assert "/v1/completions" in caplog.text
    assert "secret" not in caplog.text and str(shared.tokens["admin"]) not in caplog.text
