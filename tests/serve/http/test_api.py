"""The HTTP interface over a real writer and reader in one process: what each route does, allows and refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from endpoints import world_facts
from full_disk import full_disk
from one_process import Endpoint

from malmen.data.tokens import make_batches
from malmen.lm.model import fact_encoder
from malmen.lm.overlay import edited
from malmen.serve.http.access import SCOPES

FACTS = [{"prompt": fact.prompt, "answer": fact.answer} for fact in world_facts(60)]


def test_an_edit_is_made_asked_for_and_taken_back(fresh: Endpoint) -> None:
    fact = FACTS[0]
    before = fresh.complete(fact["prompt"])
    made = fresh.add(fact)
    assert made["edits"][0]["holds"]
    assert fresh.complete(fact["prompt"]) == fact["answer"] != before
    assert fresh.complete(fact["prompt"], "base") == before
    assert fresh.complete(fact["prompt"], made["version"]) == fact["answer"]
    name = made["edits"][0]["id"]
    assert fresh.admin.get(f"/v1/edits/{name}").json()["state"] == "live"
    gone = fresh.admin.delete(f"/v1/edits/{name}")
    assert gone.status_code == 201 and gone.json()["num_facts"] == 0
    assert fresh.complete(fact["prompt"]) == before
    assert fresh.complete(fact["prompt"], made["version"]) == fact["answer"]  # a version is for ever
    assert fresh.admin.get(f"/v1/edits/{name}").json()["state"] == "removed"
    assert fresh.admin.delete(f"/v1/edits/{name}").status_code == 409


def test_a_roll_back_needs_to_know_where_the_alias_is(fresh: Endpoint) -> None:
    first, second = fresh.add(FACTS[0]), fresh.add(FACTS[1])
    at = fresh.admin.get("/v1/aliases/live")
    move = {"json": {"version": first["version"]}}
    assert fresh.admin.put("/v1/aliases/live", **move).status_code == 428
    assert fresh.admin.put("/v1/aliases/live", **move, headers={"If-Match": '"1"'}).status_code == 412
    assert fresh.admin.put("/v1/aliases/live", **move, headers={"If-Match": "what"}).status_code == 412
    moved = fresh.admin.put("/v1/aliases/live", **move, headers={"If-Match": at.headers["ETag"]})
    assert moved.status_code == 200 and moved.headers["ETag"] != at.headers["ETag"]
    assert fresh.complete(FACTS[1]["prompt"]) == fresh.complete(FACTS[1]["prompt"], "base")
    assert fresh.admin.get(f"/v1/edits/{second['edits'][0]['id']}").json()["state"] == "rolled_back"
    asked = {"prompt": FACTS[1]["prompt"], "min_version": second["version"]}
    assert fresh.admin.post("/v1/completions", json=asked).status_code == 409
    asked["min_version"] = first["version"]
    assert fresh.admin.post("/v1/completions", json=asked).status_code == 200
    names = fresh.admin.get("/v1/versions").json()["versions"]
    assert [one["aliases"] for one in names] == [[], ["live"], ["base"]]
    assert fresh.admin.put("/v1/aliases/stable", **move).json()["revision"] == 1


def test_a_large_batch_runs_as_a_job(shared: Endpoint) -> None:
    facts, key = FACTS[20:32], {"Idempotency-Key": "large"}
    reply = shared.admin.post("/v1/edits", json={"facts": facts}, headers=key)
    assert reply.status_code == 202 and reply.headers["Location"] == f"/v1/jobs/{reply.json()['id']}"
    again = shared.admin.post("/v1/edits", json={"facts": facts}, headers=key)
    assert again.json()["id"] == reply.json()["id"]
    other = shared.admin.post("/v1/edits", json={"facts": FACTS[20:33]}, headers=key)
    assert other.status_code == 422
    done = wait_for(shared, reply.headers["Location"])
    assert done["state"] == "done" and done["done"] == done["total"] == 12, done
    assert done["result"]["version"] == shared.admin.get("/v1/aliases/live").json()["version"]
    wrong = shared.admin.post("/v1/edits", json={"facts": [{**facts[0], "answer": f"a {n}"} for n in range(9)]})
    failed = wait_for(shared, wrong.headers["Location"])
    assert failed["state"] == "failed" and failed["problem"]["status"] == 422
    shared.admin.post("/v1/edits", json={"remove": [row["id"] for row in done["result"]["edits"]]})


def wait_for(endpoint: Endpoint, address: str) -> dict[str, Any]:
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        job = endpoint.admin.get(address).json()
        if job["state"] in ("done", "failed"):
            return dict(job)
        time.sleep(0.05)  # between two looks; the wait is bounded above
    raise AssertionError(job)


def test_a_repeated_key_gives_the_first_reply(shared: Endpoint) -> None:
    body, headers = {"facts": [FACTS[40]]}, {"Idempotency-Key": "once"}
    first = shared.admin.post("/v1/edits", json=body, headers=headers)
    again = shared.admin.post("/v1/edits", json=body, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200) and first.json() == again.json()
    shared.admin.delete(f"/v1/edits/{first.json()['edits'][0]['id']}")


def test_a_dry_run_publishes_nothing(shared: Endpoint) -> None:
    before = shared.admin.get("/v1/aliases/live").json()
    reply = shared.admin.post("/v1/edits", json={"facts": [FACTS[41]], "dry_run": True})
    assert reply.status_code == 200 and reply.json()["version"] is None
    assert shared.admin.get("/v1/aliases/live").json() == before


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


def test_a_full_disk_is_told_over_http_and_the_same_key_does_it_later(fresh: Endpoint) -> None:
    fresh.add(FACTS[0])
    asked = {"json": {"facts": [FACTS[1]]}, "headers": {"Idempotency-Key": "k"}}
    with full_disk(3000):
        reply = fresh.admin.post("/v1/edits", **asked)
    assert reply.status_code == 503 and int(reply.headers["Retry-After"]) > 0
    assert fresh.complete(FACTS[0]["prompt"]) == FACTS[0]["answer"]
    assert fresh.admin.post("/v1/edits", **asked).status_code == 201
    assert fresh.complete(FACTS[1]["prompt"]) == FACTS[1]["answer"]


def test_a_database_that_is_gone_is_told_over_http_and_its_return_is_enough(fresh: Endpoint) -> None:
    made = fresh.add(FACTS[0])
    ledgers = (fresh.backend.ledger, fresh.workers.writer.service.ledger)
    file = Path(fresh.settings.store) / "ledger.db"
    away = file.with_name("away.db")
    for ledger in ledgers:
        ledger.close()
    file.rename(away)
    file.mkdir()  # what cannot be opened
    body = {"json": {"facts": [FACTS[1]]}, "headers": {"Idempotency-Key": "k"}}
    assert fresh.admin.post("/v1/edits", **body).status_code == 503
    assert fresh.admin.get("/v1/versions").status_code == 503
    assert fresh.admin.get("/readyz").status_code == 503 and fresh.admin.get("/healthz").status_code == 200
    for ledger in ledgers:
        ledger.close()
    file.rmdir()
    away.rename(file)
    assert fresh.admin.get("/readyz").status_code == 200
    again = fresh.admin.post("/v1/edits", **body)
    assert again.status_code == 201 and again.json()["parent"] == made["version"]


def test_an_evaluation_of_too_many_records_and_too_many_jobs_are_refused(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path, limits={"job_facts": 1, "waiting_jobs": 1, "evaluate_records": 2})
    endpoint.workers.writer.jobs.close()  # nobody works on them
    first = endpoint.admin.post("/v1/edits", json={"facts": FACTS[:2]}, headers={"Idempotency-Key": "k"})
    assert first.status_code == 202
    assert endpoint.admin.post("/v1/edits", json={"facts": FACTS[2:4]}).status_code == 429
    again = endpoint.admin.post("/v1/edits", json={"facts": FACTS[:2]}, headers={"Idempotency-Key": "k"})
    assert again.status_code == 202 and again.json()["id"] == first.json()["id"]
    records = [{"prompt": fact["prompt"], "answer": fact["answer"]} for fact in FACTS[:3]]
    assert endpoint.admin.post("/v1/evaluate", json={"records": records}).status_code == 413
    endpoint.close()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"rephrasings": ["x"] * 3, "unrelated": [FACTS[1]] * 2}, "6 facts in one evaluation; the limit is 5"),
        ({"rephrasings": ["x" * 501]}, "501 characters in record 0; the limit is 500"),
        ({"unrelated": [{"prompt": "x", "answer": "x" * 501}]}, "501 characters in record 0; the limit is 500"),
        ({"answer": "x" * 501}, "501 characters in record 0; the limit is 500"),
    ],
)
def test_an_evaluation_is_limited_by_all_that_a_reader_would_be_asked(
    shared: Endpoint, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], said: str
) -> None:
    limits = shared.settings.limits.model_copy(update={"evaluate_facts": 5})
    monkeypatch.setattr(shared.backend, "settings", shared.settings.model_copy(update={"limits": limits}))
    reply = shared.clients["read"].post("/v1/evaluate", json={"records": [{**FACTS[0], **record}]})
    assert reply.status_code == 413 and said in reply.json()["detail"]
    assert reply.headers["Content-Type"] == "application/problem+json"
    fits = {**FACTS[0], "rephrasings": ["x"] * 2, "unrelated": [FACTS[1]] * 2}
    asked = {"records": [fits], "generate": False}
    assert shared.clients["read"].post("/v1/evaluate", json=asked).status_code == 200


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


def test_an_evaluation_measures_a_version_beside_the_unedited_model(fresh: Endpoint) -> None:
    fresh.add(FACTS[0])
    record = {**FACTS[0], "rephrasings": [FACTS[0]["prompt"]], "unrelated": [FACTS[1]]}
    found = fresh.clients["read"].post("/v1/evaluate", json={"records": [record]}).json()
    assert found["scores"]["edit_success"] == found["scores"]["generalization_success"] == 1
    assert found["scores"]["edit_success_before"] < 1
    assert found["facts"][0]["after"] == FACTS[0]["answer"] != found["facts"][0]["before"]


TEMPLATE = """{% if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{% for turn in messages %}{{ turn.content }} {% endfor %}"""


@pytest.mark.parametrize("stream", [False, True])
def test_messages_that_the_chat_template_refuses_are_the_callers_mistake(
    shared: Endpoint, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(shared.workers.reader.lm.tokenizer, "chat_template", TEMPLATE)
    turns = [{"role": role, "content": "x"} for role in ("system", "user")]
    asked = {"messages": turns, "max_tokens": 1, "stream": stream}
    refused = shared.admin.post("/v1/chat/completions", json=asked)
    assert refused.status_code == 422 and "System role not supported" in refused.json()["detail"]
    taken = shared.admin.post("/v1/chat/completions", json={**asked, "messages": turns[1:]})
    assert taken.status_code == 200, taken.text


def test_a_second_export_at_the_same_time_is_told_to_wait(fresh: Endpoint) -> None:
    made = fresh.add(FACTS[0])
    with fresh.workers.writer.exporting:
        reply = fresh.admin.post(f"/v1/versions/{made['version']}/export", json={})
    assert reply.status_code == 429 and int(reply.headers["Retry-After"]) > 0
    assert fresh.admin.post(f"/v1/versions/{made['version']}/export", json={}).status_code == 201


@pytest.mark.slow  # three exports, loaded again
def test_exported_files_give_the_endpoints_logits(fresh: Endpoint, tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from malmen.data.world_model import WORLD_MODEL

    made = fresh.add(*FACTS[:3])
    folders = {}
    for kind in ("delta", "lora", "merged"):
        reply = fresh.admin.post(f"/v1/versions/{made['version']}/export", json={"kind": kind})
        assert reply.status_code == 201, reply.text
        folders[kind] = tmp_path / kind
        folders[kind].mkdir()
        for name, address in reply.json()["files"].items():
            (folders[kind] / name).write_bytes(fresh.admin.get(address).content)
    lm, reader = fresh.workers.reader.lm, fresh.workers.reader
    encoder = fact_encoder(lm, reader.config.data)
    batch = make_batches([encoder.encode(fact) for fact in world_facts(8)], 4096, lm.pad_id)[0]
    shifts = reader.blobs.get(fresh.backend.ledger.resolve(made["version"]).shifts)
    with torch.no_grad(), edited(lm, shifts):
        expected = lm.model(**batch.inputs).logits
    delta = AutoModelForCausalLM.from_pretrained(WORLD_MODEL, dtype="float32")
    for name, change in load_file(folders["delta"] / "delta.safetensors").items():
        delta.get_parameter(name).data += change
    plain = AutoModelForCausalLM.from_pretrained(WORLD_MODEL, dtype="float32")
    models = {
        "delta": delta,
        "lora": PeftModel.from_pretrained(plain, folders["lora"]),
        "merged": AutoModelForCausalLM.from_pretrained(folders["merged"], dtype="float32"),
    }
    for kind, model in models.items():
        with torch.no_grad():
            found = model.eval()(**batch.inputs).logits
        assert float((found - expected).abs().max()) <= 1e-4, kind


def test_the_console_is_served_and_loads_nothing_from_elsewhere(shared: Endpoint) -> None:
    client = shared.client({})
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["Content-Security-Policy"]
    for name in ("console.js", "api.js", "console.css"):
        found = client.get(f"/console/{name}")
        assert found.status_code == 200 and name in page.text + client.get("/console/console.js").text
        assert "http://" not in found.text.replace("http://www.w3.org", "") and "https://" not in found.text
    assert client.get("/console/..%2Fapi.py").status_code == 404
