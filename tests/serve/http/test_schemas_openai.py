"""OpenAI's requests and responses."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from malmen.serve.http.schemas_openai import ChatIn, Chunks, CompletionIn, chat_completion, completion
from malmen.serve.messages import AnswerState, Sampling

TURN = {"role": "user", "content": "Who?"}


def test_a_request_becomes_a_sampling_within_the_endpoints_limit() -> None:
    body = CompletionIn.model_validate({"prompt": "a", "max_tokens": 900, "stop": "b", "seed": 3, "best_of": 1})
    assert body.sampling(limit=64) == Sampling(64, 0.0, 1.0, ("b",), 3)
    assert CompletionIn(prompt=["a", "b"]).sampling(limit=64).max_tokens == 16
    assert CompletionIn(prompt=["a", "b"]).prompts() == ["a", "b"]


def test_the_newer_name_of_the_number_of_tokens_has_precedence() -> None:
    body = {"messages": [TURN], "max_tokens": 5}
    assert ChatIn.model_validate(body).sampling(limit=64).max_tokens == 5
    assert ChatIn.model_validate({**body, "max_completion_tokens": 7}).sampling(limit=64).max_tokens == 7


def test_the_parts_of_a_message_are_one_text_and_pictures_are_refused() -> None:
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "plays?"}]
    assert ChatIn.model_validate({"messages": [{**TURN, "content": parts}]}).messages[0].text() == "Who plays?"
    with pytest.raises(ValidationError):
        ChatIn.model_validate({"messages": [{**TURN, "content": [{"type": "image_url", "image_url": "x"}]}]})


def test_responses_have_every_answer_and_the_sum_of_their_tokens() -> None:
    answers = [AnswerState(" Ann", "stop", 3, 1), AnswerState(" Bob", "length", 4, 2)]
    reply = completion(answers, "v1")
    assert [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]] == [
        (" Ann", "stop"), (" Bob", "length")
    ]  # fmt: skip
    assert reply["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert reply["model"] == "v1" and reply["object"] == "text_completion"
    assert chat_completion(answers[0], "v1")["choices"][0]["message"] == {"role": "assistant", "content": "Ann"}


def test_the_chunks_of_one_answer_share_an_id() -> None:
    chunks = Chunks(True, "v1")
    first, last = chunks.piece("Ann", None), chunks.piece("", "stop")
    assert first["id"] == last["id"] != Chunks(True, "v1").piece("", None)["id"]
    assert first["choices"][0]["delta"]["content"] == "Ann" and last["choices"][0]["finish_reason"] == "stop"
