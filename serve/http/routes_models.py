"""The routes of the model: OpenAI's completions and evaluation, for any version."""

from __future__ import annotations

import asyncio
import json
from asyncio import to_thread
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse

from malmen.serve.http.api import Backend, BackendDep, check_length, check_number, problems, requires
from malmen.serve.http.schemas import EvaluateIn, EvaluateOut, Name
from malmen.serve.http.schemas_openai import ChatIn, Chunks, CompletionIn, chat_completion, completion
from malmen.serve.ledger.tables import Version
from malmen.serve.messages import AnswerState, Evaluate, Prompt
from malmen.serve.problems import Problem

router = APIRouter(tags=["models"], dependencies=[requires("read")])
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, or with `stream` its pieces",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


@router.get("/v1/models", responses=problems())
def list_models(backend: BackendDep) -> dict[str, Any]:
    """The aliases and the newest versions, as OpenAI lists models."""
    names = [alias.name for alias in backend.ledger.aliases()] + [version.id for version in backend.ledger.versions()]
    return {"object": "list", "data": [_model(name) for name in names]}


@router.get("/v1/models/{name}", responses=problems(404))
def get_model(backend: BackendDep, name: Name) -> dict[str, Any]:
    """A version or alias as a model."""
    backend.ledger.resolve(name)
    return _model(name)


@router.post("/v1/completions", responses={**_STREAMS, **problems(404, 409)})
async def complete(body: CompletionIn, backend: BackendDep) -> Response:
    """Continue a prompt, or several, as a version of the model would."""
    version = await find_version(backend, body.model, body.min_version)
    sampling = body.sampling(backend.settings.limits.max_tokens)
    for text in body.prompts():
        check_length(backend, "a prompt", text)
    prompts = [Prompt(text, version.shifts, sampling) for text in body.prompts()]
    if body.stream:
        if len(prompts) > 1:
            raise Problem(422, "only one prompt can be streamed")
        return await _streamed(backend, prompts[0], Chunks(False, version.id))
    answers = await asyncio.gather(*(backend.workers.ask_reader(prompt) for prompt in prompts))
    return _completed(backend, answers, completion(answers, version.id))


@router.post("/v1/chat/completions", responses={**_STREAMS, **problems(404, 409)})
async def chat(body: ChatIn, backend: BackendDep) -> Response:
    """Answer a chat as a version of the model would; a model without a chat template reads the turns' texts."""
    version = await find_version(backend, body.model, body.min_version)
    turns = [{"role": turn.role, "content": turn.text()} for turn in body.messages]
    for turn in turns:
        check_length(backend, "a message", turn["content"])
    prompt = Prompt(turns, version.shifts, body.sampling(backend.settings.limits.max_tokens))
    if body.stream:
        return await _streamed(backend, prompt, Chunks(True, version.id))
    answer = await backend.workers.ask_reader(prompt)
    return _completed(backend, [answer], chat_completion(answer, version.id))


@router.post("/v1/evaluate", response_model=EvaluateOut, responses=problems(404))
async def evaluate(body: EvaluateIn, backend: BackendDep) -> Any:
    """Measure a version on records, teacher-forced and generated, and compare with the unedited model."""
    version = await to_thread(backend.ledger.resolve, body.version)
    limits, records = backend.settings.limits, body.records
    check_number(len(records), "records in one evaluation", limits.evaluate_records)
    # A reader answers nobody else meanwhile, so the limit is on all facts, not only on records.
    check_number(sum(record.num_facts() for record in records), "facts in one evaluation", limits.evaluate_facts)
    for index, record in enumerate(records):
        check_length(backend, f"record {index}", *record.texts())
    request = Evaluate([record.record() for record in records], version.shifts, body.generate)
    result = await backend.workers.ask_reader(request)
    return {"version": version.id, **vars(result)}


async def find_version(backend: Backend, name: str, min_version: str | None) -> Version:
    """The version of a name; a Problem 409 unless it is `min_version` or built on it."""
    version = await to_thread(backend.ledger.resolve, name)
    if min_version is not None:
        least = await to_thread(backend.ledger.resolve, min_version)
        if least.id not in await to_thread(backend.ledger.ancestry, version.id):
            raise Problem(409, f"{name} is at {version.id}, which is not built on {least.id}: it was rolled back")
    return version


async def _streamed(backend: Backend, prompt: Prompt, chunks: Chunks) -> Response:
    """Server-sent events; a prompt that cannot be answered is refused before the first of them."""
    states = backend.workers.stream(prompt)
    first = await anext(states)

    async def events() -> AsyncIterator[str]:
        sent, state = "", first
        while True:
            more, sent = state.text[len(sent) :], state.text
            if more:
                yield f"data: {json.dumps(chunks.piece(more, None))}\n\n"
            if state.finish_reason:
                break
            state = await anext(states)
        backend.metrics.tokens.inc(state.completion_tokens)
        yield f"data: {json.dumps(chunks.piece('', state.finish_reason))}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _completed(backend: Backend, answers: list[AnswerState], reply: dict[str, Any]) -> Response:
    backend.metrics.tokens.inc(sum(answer.completion_tokens for answer in answers))
    readers = dict.fromkeys(answer.reader for answer in answers if answer.reader)
    return JSONResponse(reply, headers={"X-Malmen-Reader": ", ".join(readers)} if readers else None)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "malmen"}
