"""Answers: of several versions at a time, in one batch, streamed, drawn, and within the model's places."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from endpoints import world_facts
from one_process import Endpoint

from malmen.lm.generate import ask
from malmen.lm.overlay import edited
from malmen.serve.messages import AnswerState, Prompt, Sampling
from malmen.serve.reading.reader import Reader

FACTS = [{"prompt": fact.prompt, "answer": fact.answer} for fact in world_facts(60)]


def finished(reader: Reader, prompts: Sequence[Prompt]) -> list[AnswerState]:
    return list(reader.answer_states(prompts))[-1]


def test_prompts_of_different_versions_are_answered_in_one_batch_as_they_would_be_alone(fresh: Endpoint) -> None:
    """Rows of one batch see different weights; padding in front changes nothing."""
    versions = [None, *(fresh.backend.ledger.resolve(fresh.add(fact)["version"]).shifts for fact in FACTS[:3])]
    prompts = [Prompt(fact["prompt"], shifts, Sampling(6)) for fact in FACTS[:6] for shifts in versions]
    reader = fresh.workers.reader
    together = [answer.text for answer in finished(reader, prompts[::-1])][::-1]
    assert together == [finished(reader, [prompt])[0].text for prompt in prompts]
    assert len(set(together)) > 6


def test_a_long_answer_to_a_short_prompt_does_not_push_a_long_prompt_beyond_the_models_places(fresh: Endpoint) -> None:
    reader = fresh.workers.reader
    long, short = " ".join(FACTS[0]["prompt"] for _ in range(3)), "a"
    places = reader.lm.max_positions
    assert places is not None
    drawn = Sampling(places, temperature=2.0, seed=3)
    answers = finished(reader, [Prompt(text, None, drawn) for text in (long, short)])
    assert answers[0].prompt_tokens > 30 and all(answer.finish_reason for answer in answers)


def test_a_prompt_that_fills_all_places_is_answered_by_one_token(fresh: Endpoint) -> None:
    reader = fresh.workers.reader
    places = reader.encoder.max_length
    ids = reader.encode(Prompt("a", None, Sampling(1)))
    text = " ".join(["a"] * places)
    while len(reader.encoder.prompt_ids(text)) > places:
        text = text[:-2]
    assert len(ids) == 1 and len(reader.encoder.prompt_ids(text)) == places
    full, short = finished(reader, [Prompt(text, None, Sampling(9)), Prompt("a", None, Sampling(9))])
    assert (full.prompt_tokens, full.finish_reason) == (places, "length") and full.completion_tokens == 1
    assert short.text == finished(reader, [Prompt("a", None, Sampling(9))])[0].text


@pytest.mark.parametrize("how", [{"temperature": 1e-40}, {"temperature": 1.0, "top_p": 1e-50}])
def test_the_smallest_numbers_that_are_allowed_give_the_most_probable_answer(
    shared: Endpoint, how: dict[str, float]
) -> None:
    body = {"model": "base", "prompt": FACTS[9]["prompt"], "max_tokens": 8}
    (expected,) = shared.admin.post("/v1/completions", json=body).json()["choices"]
    reply = shared.admin.post("/v1/completions", json={**body, **how})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == [expected] and expected["text"]


def test_a_version_whose_file_was_damaged_is_told_and_others_are_served(fresh: Endpoint) -> None:
    made = fresh.add(FACTS[0])
    fresh.workers.reader.blobs.path(fresh.backend.ledger.resolve(made["version"]).shifts).write_bytes(b"x")
    asked = {"model": "live", "prompt": "a", "max_tokens": 2}
    reply = fresh.admin.post("/v1/completions", json=asked)
    assert reply.status_code == 503 and "was changed" in reply.json()["detail"]
    assert fresh.admin.post("/v1/completions", json={**asked, "model": "base"}).status_code == 200


def test_an_overlay_in_the_reader_is_the_edit_laid_over_the_model(fresh: Endpoint) -> None:
    made = fresh.add(*FACTS[:4])
    reader, lm = fresh.workers.reader, fresh.workers.reader.lm
    shifts = reader.blobs.get(fresh.backend.ledger.resolve(made["version"]).shifts)
    prompts = [fact["prompt"] for fact in FACTS[:10]]
    with edited(lm, shifts):
        expected = ask(lm, prompts, 12)
    assert [fresh.complete(prompt) for prompt in prompts] == expected


def test_a_streamed_answer_is_the_same_answer_in_pieces(shared: Endpoint) -> None:
    asked = {"model": "base", "messages": [{"role": "user", "content": FACTS[9]["prompt"]}], "max_tokens": 8}
    whole = shared.admin.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    with shared.admin.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(piece["delta"]["content"] for piece in pieces).strip() == whole != ""
    assert [piece["finish_reason"] for piece in pieces][-1] in ("stop", "length")


def test_stop_texts_and_seeds_are_kept_to(shared: Endpoint) -> None:
    asked = {"model": "base", "prompt": FACTS[9]["prompt"], "max_tokens": 8}
    text = shared.admin.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    stopped = shared.admin.post("/v1/completions", json={**asked, "stop": text[3]}).json()["choices"][0]
    assert stopped["text"] == text[: text.index(text[3])] and stopped["finish_reason"] == "stop"
    drawn = {**asked, "temperature": 2.0, "seed": 5, "top_p": 0.99}
    one, other = (shared.admin.post("/v1/completions", json=drawn).json()["choices"] for _ in range(2))
    assert one == other
    assert len({str(shared.admin.post("/v1/completions", json={**drawn, "seed": seed}).json()["choices"])
                for seed in range(6)}) > 1  # fmt: skip
