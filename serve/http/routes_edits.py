"""Corrections: make them, list them, take them back."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Response

from malmen.serve.http.access import Caller
from malmen.serve.http.api import Backend, allowed, backend, in_thread, problems
from malmen.serve.http.problems import Problem
from malmen.serve.http.schemas import KEY_PATTERN, EditId, EditList, EditOut, EditsIn, EditsOut, JobOut
from malmen.serve.ledger.jobs import Job
from malmen.serve.ledger.tables import LIVE
from malmen.serve.ledger.view import Edit, LedgerView
from malmen.serve.messages import Change

router = APIRouter(tags=["edits"])
At = Annotated[Backend, Depends(backend)]
Key = Annotated[
    str | None,
    Header(alias="Idempotency-Key", pattern=KEY_PATTERN, description="the same key again does nothing twice"),
]
JobId = Annotated[str, Path(pattern="^j[0-9a-f]{20}$")]


@router.post(
    "/v1/edits",
    status_code=201,
    response_model=EditsOut | JobOut,
    responses={
        200: {"model": EditsOut, "description": "a dry run, nothing new, or a key that was used before"},
        202: {"model": JobOut, "description": "a large batch: it is recorded, and runs as a job"},
        **problems(409),
    },
)
async def make_edits(
    asked: EditsIn, response: Response, at: At, caller: Annotated[Caller, allowed("edit")], key: Key = None
) -> Any:
    """Make facts hold, take corrections back, or both: one new version, or nothing."""
    check_size(asked, at)
    facts = tuple(fact.fact() for fact in asked.facts)
    change = Change(caller.name, facts, tuple(asked.remove), key, asked.dry_run, asked.base_version)
    if len(facts) > at.settings.limits.job_facts:
        job = await in_thread(at.jobs.add, change, at.settings.limits.waiting_jobs)
        await at.roles.wake()
        response.status_code = 202
        response.headers["Location"] = f"/v1/jobs/{job.id}"
        return job_out(job)
    return await ask_writer(at, change, response)


async def ask_writer(at: Backend, change: Change, response: Response) -> dict[str, Any]:
    """Queue a change with the writer. A key of our own lets it be asked again if the writer dies: nothing doubles."""
    limit = at.settings.limits.waiting_edits
    if at.waiting >= limit:
        raise Problem(429, f"{limit} edits wait for the writer already", retry_after=1)
    at.waiting += 1
    at.meters.waiting.set(at.waiting)
    try:
        own = not change.key and not change.dry_run
        found = await at.roles.edit(replace(change, key=f"own {uuid.uuid4().hex}") if own else change)
    finally:
        at.waiting -= 1
        at.meters.waiting.set(at.waiting)
    replayed = found.pop("replayed", False) and not own
    news = any(row["status"] == "added" for row in found["edits"]) or bool(found["removed"])
    if found["dry_run"] or replayed or not news:
        response.status_code = 200
    else:
        at.meters.facts.inc(sum(row["status"] == "added" for row in found["edits"]))
        response.headers["Location"] = f"/v1/versions/{found['version']}"
    return found


@router.get("/v1/edits", response_model=EditList, responses=problems(), dependencies=[allowed("read")])
async def list_edits(
    at: At,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="only numbers below this one")] = None,
    state: Annotated[Literal["live", "all"], Query(description="those that hold now, or all there ever were")] = "live",
) -> Any:
    """Corrections, the newest first."""
    return await in_thread(_page, at.ledger, limit, before, state)


@router.get("/v1/edits/{id}", response_model=EditOut, responses=problems(404), dependencies=[allowed("read")])
async def get_edit(at: At, id: EditId) -> Any:
    """One correction."""
    found = await in_thread(at.ledger.edit, id)
    if found is None:
        raise Problem(404, f"there is no edit {id!r}")
    return (await in_thread(described, at.ledger, [found]))[0]


@router.delete("/v1/edits/{id}", status_code=201, response_model=EditsOut, responses=problems(404, 409))
async def remove_edit(
    at: At, id: EditId, response: Response, caller: Annotated[Caller, allowed("edit")], key: Key = None
) -> Any:
    """Take one correction back, exactly: a new version without it."""
    if await in_thread(at.ledger.edit, id) is None:
        raise Problem(404, f"there is no edit {id!r}")
    return await ask_writer(at, Change(caller.name, remove=(id,), key=key), response)


@router.get("/v1/jobs/{id}", response_model=JobOut, responses=problems(404), dependencies=[allowed("edit")])
async def get_job(at: At, id: JobId) -> Any:
    """How far a large batch has come."""
    return job_out(await in_thread(at.jobs.get, id))


def check_size(asked: EditsIn, at: Backend) -> None:
    """Limits that the shape of a request does not show."""
    limits = at.settings.limits
    number = len(asked.facts) + len(asked.remove)
    if number > limits.facts_per_call:
        raise Problem(413, f"{number} facts in one request; at most {limits.facts_per_call} are taken")
    for index, fact in enumerate(asked.facts):
        longest = max(len(fact.prompt), len(fact.answer))
        if longest > limits.text_chars:
            raise Problem(413, f"fact {index} has {longest} characters; at most {limits.text_chars} are taken")


def job_out(job: Job) -> dict[str, Any]:
    """A job for its caller."""
    state = "running" if job.state == "again" else job.state
    shown = {"id": job.id, "state": state, "done": job.done, "total": job.total}
    return {**shown, "problem" if job.state == "failed" else "result": job.result}


def described(ledger: LedgerView, edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Corrections, each with its state in what is live now."""
    live = ledger.resolve(LIVE).id
    held, ended = ledger.members(live), ledger.ended([edit.id for edit in edits])
    built_on = ledger.ancestry(live) if ended else frozenset()
    rows = []
    for edit in edits:
        how = [kind for version, kind in ended.get(edit.id, ()) if version in built_on]
        state = "live" if edit.id in held else how[-1] if how else "rolled_back"
        shown = {name: getattr(edit, name) for name in ("id", "number", "prompt", "answer", "version", "actor", "at")}
        rows.append({**shown, "state": state, **edit.report})
    return rows


def _page(ledger: LedgerView, limit: int, before: int | None, state: str) -> dict[str, Any]:
    if state == "all":
        found = ledger.edits(limit, before)
    else:
        members = ledger.edits_by_id(sorted(ledger.members(ledger.resolve(LIVE).id)))
        found = [edit for edit in reversed(members) if before is None or edit.number < before][:limit]
    return {"edits": described(ledger, found), "next": found[-1].number if len(found) == limit else None}
