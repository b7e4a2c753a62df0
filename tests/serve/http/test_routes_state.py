"""The routes of versions, aliases and exports, and of the console."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from endpoints import world_facts
from one_process import Endpoint

from malmen.data.tokens import one_batch
from malmen.lm.model import fact_encoder
from malmen.lm.overlay import edited

FACTS = [{"prompt": fact.prompt, "answer": fact.answer} for fact in world_facts(60)]


def test_a_roll_back_needs_to_know_where_the_alias_is(fresh: Endpoint) -> None:
    first, second = fresh.add(FACTS[0]), fresh.add(FACTS[1])
    at = fresh.admin.get("/v1/aliases/live")
    assert at.json().keys() == {"name", "version", "revision", "at"}
    assert at.json() in fresh.admin.get("/v1/aliases").json()["aliases"]
    move = {"json": {"version": first["version"]}}
    assert fresh.admin.put("/v1/aliases/live", **move).status_code == 428
    assert fresh.admin.put("/v1/aliases/live", **move, headers={"If-Match": '"1"'}).status_code == 412
    assert fresh.admin.put("/v1/aliases/live", **move, headers={"If-Match": "what"}).status_code == 412
    moved = fresh.admin.put("/v1/aliases/live", **move, headers={"If-Match": at.headers["ETag"]})
    assert moved.json().keys() == at.json().keys()
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

    from malmen.data.world import WORLD_MODEL

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
    batch = one_batch([encoder.encode(fact) for fact in world_facts(8)], lm.pad_id)
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
