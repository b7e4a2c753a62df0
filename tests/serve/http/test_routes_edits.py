"""The routes of edits and jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from endpoints import world_facts
from full_disk import full_disk
from one_process import Endpoint

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
