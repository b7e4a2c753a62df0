"""The routes of the model: chats and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from endpoints import world_facts
from one_process import Endpoint

FACTS = [{"prompt": fact.prompt, "answer": fact.answer} for fact in world_facts(60)]


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
