"""Asking the model: OpenAI's completions, for any version, and measuring one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response, StreamingResponse

from malmen.serve.http.api import Backend, allowed, backend, in_thread, problems
from malmen.serve.http.problems import Problem
from malmen.serve.http.schemas import EvaluateIn, EvaluateOut, Name
from malmen.serve.http.schemas_openai import ChatIn, Chunks, CompletionIn, chat_completion, completion
from malmen.serve.ledger.view import Version
from malmen.serve.messages import Prompt

router = APIRouter(tags=["models"], dependencies=[allowed("read")])
At = Annotated[Backend, Depends(backend)]
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, or with `stream` its pieces",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


@router.get("/v1/models", responses=problems())
async def list_models(at: At) -> dict[str, Any]:
    """The aliases and the newest versions, as OpenAI lists models."""
    aliases, versions = await in_thread(at.ledger.aliases), await in_thread(at.ledger.versions, 100)
    return {"object": "list", "data": [_model(one) for one in (*(a.name for a in aliases), *(v.id for v in versions))]}


@router.get("/v1/models/{name}", responses=problems(404))
async def get_model(at: At, name: Name) -> dict[str, Any]:
    """A version or alias as a model."""
    await in_thread(at.ledger.resolve, name)
    return _model(name)


@router.post("/v1/completions", responses={**_STREAMS, **problems(404, 409)})
async def complete(asked: CompletionIn, at: At) -> Response:
    """Continue a prompt, or several, as a version of the model would."""
    version = await find_version(at, asked.model, asked.min_version)
    sampling = asked.sampling(at.settings.limits.max_tokens)
    prompts = [Prompt(text, version.shifts, sampling) for text in _checked(at, asked.prompts())]
    if asked.stream:
        if len(prompts) > 1:
            raise Problem(422, "one prompt at a time can be streamed")
        return await _streamed(at, prompts[0], Chunks(False, version.id))
    answers = await asyncio.gather(*(at.roles.complete(prompt) for prompt in prompts))
    return _answered(at, list(answers), completion(list(answers), version.id))


@router.post("/v1/chat/completions", responses={**_STREAMS, **problems(404, 409)})
async def chat(asked: ChatIn, at: At) -> Response:
    """Answer a chat as a version of the model would; a model without a chat template reads the turns' texts."""
    version = await find_version(at, asked.model, asked.min_version)
    turns = [{"role": turn.role, "content": turn.text()} for turn in asked.messages]
    _checked(at, [turn["content"] for turn in turns])
    read = await at.roles.chat_text(turns)
    sampling = asked.sampling(at.settings.limits.max_tokens)
    prompt = Prompt(read["text"], version.shifts, sampling, read["verbatim"])
    if asked.stream:
        return await _streamed(at, prompt, Chunks(True, version.id))
    answer = await at.roles.complete(prompt)
    return _answered(at, [answer], chat_completion(answer, version.id))


@router.post("/v1/evaluate", response_model=EvaluateOut, responses=problems(404))
async def evaluate(asked: EvaluateIn, at: At) -> Any:
    """Measure a version on records: teacher-forced and generated, beside the unedited model, fact by fact."""
    version = await in_thread(at.ledger.resolve, asked.version)
    _check_size(at, asked)
    records = [record.record() for record in asked.records]
    found = await at.roles.evaluate(records, version.shifts, asked.generate)
    return {"version": version.id, **found}


async def find_version(at: Backend, name: str, min_version: str | None) -> Version:
    """The version of a name, at least as new as one that the caller has seen published."""
    version: Version = await in_thread(at.ledger.resolve, name)
    if min_version is not None:
        least = await in_thread(at.ledger.resolve, min_version)
        if least.id not in await in_thread(at.ledger.ancestry, version.id):
            raise Problem(409, f"{name} is at {version.id}, which was not built on {least.id}: it was rolled back")
    return version


async def _streamed(at: Backend, prompt: Prompt, chunks: Chunks) -> Response:
    """Server-sent events; what is wrong with the prompt is told before the first of them."""
    states = at.roles.stream(prompt)
    first = await anext(states)

    async def events() -> AsyncIterator[str]:
        sent = ""
        async for state in _chained(first, states):
            more, sent = state["text"][len(sent) :], state["text"]
            if more:
                yield f"data: {json.dumps(chunks.piece(more, None))}\n\n"
            if state["finish_reason"]:
                at.meters.tokens.inc(state["completion_tokens"])
                yield f"data: {json.dumps(chunks.piece('', state['finish_reason']))}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def _chained(first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    yield first
    async for state in rest:
        yield state


def _answered(at: Backend, answers: list[dict[str, Any]], reply: dict[str, Any]) -> Response:
    at.meters.tokens.inc(sum(answer["completion_tokens"] for answer in answers))
    readers = dict.fromkeys(answer["reader"] for answer in answers if "reader" in answer)
    return JSONResponse(reply, headers={"X-Malmen-Reader": ", ".join(readers)} if readers else None)


def _checked(at: Backend, texts: list[str]) -> list[str]:
    limit = at.settings.limits.text_chars
    if (longest := max(map(len, texts))) > limit:
        raise Problem(413, f"a prompt has {longest} characters; at most {limit} are taken")
    return texts


def _check_size(at: Backend, asked: EvaluateIn) -> None:
    """A reader answers nobody else meanwhile, so that all that it would be asked counts, not the records alone."""
    limits, records = at.settings.limits, asked.records
    if len(records) > limits.evaluate_records:
        raise Problem(413, f"{len(records)} records in one evaluation; at most {limits.evaluate_records} are taken")
    number = sum(record.num_facts() for record in records)
    if number > limits.evaluate_facts:
        raise Problem(413, f"{number} facts in one evaluation; at most {limits.evaluate_facts} are taken")
    for index, record in enumerate(records):
        longest = max(map(len, record.texts()))
        if longest > limits.text_chars:
            raise Problem(413, f"record {index} has {longest} characters; at most {limits.text_chars} are taken")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "malmen"}
