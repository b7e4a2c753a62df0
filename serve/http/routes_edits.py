"""The routes of edits and jobs: add facts, list edits, remove them."""

from __future__ import annotations

import logging
import uuid
from asyncio import to_thread
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Response

from malmen.serve.http.access import Caller
from malmen.serve.http.api import Backend, BackendDep, check_length, check_number, problems, requires
from malmen.serve.http.schemas import EditId, EditList, EditOut, EditsIn, JobOut
from malmen.serve.ledger.tables import LIVE, Edit, Job
from malmen.serve.ledger.view import LedgerView
from malmen.serve.messages import Change, EditReply, WakeJobs
from malmen.serve.problems import Problem

log = logging.getLogger(__name__)
router = APIRouter(tags=["edits"])
Key = Annotated[
    str | None,
    Header(alias="Idempotency-Key", pattern=r"^[\x21-\x7e]{1,200}$", description="carried out once for each key"),
]
JobId = Annotated[str, Path(pattern="^j[0-9a-f]{20}$")]


@router.post(
    "/v1/edits",
    status_code=201,
    response_model=EditReply | JobOut,
    responses={
        200: {"model": EditReply, "description": "a dry run, nothing new, or a key that was used before"},
        202: {"model": JobOut, "description": "a large change: it is recorded, and runs as a job"},
        **problems(409),
    },
)
async def make_edits(
    body: EditsIn, response: Response, backend: BackendDep, caller: Annotated[Caller, requires("edit")], key: Key = None
) -> Any:
    """Add facts, remove edits, or both: one new version, or nothing."""
    check_number(len(body.facts) + len(body.remove), "facts in one request", backend.settings.limits.facts_per_call)
    for index, fact in enumerate(body.facts):
        check_length(backend, f"fact {index}", fact.prompt, fact.answer)
    facts = tuple(fact.fact() for fact in body.facts)
    change = Change(caller.name, facts, tuple(body.remove), key, body.dry_run, body.base_version)
    if len(facts) > backend.settings.limits.job_facts:
        job = await to_thread(backend.jobs.add, change, backend.settings.limits.waiting_jobs)
        try:
            await backend.workers.ask_writer(WakeJobs())
        except Problem as problem:  # the job is recorded: the next writer finds it
            log.warning("a job waits: %s", problem.detail)
        response.status_code = 202
        response.headers["Location"] = f"/v1/jobs/{job.id}"
        return job_out(job)
    return await apply_change(backend, change, response)


async def apply_change(backend: Backend, change: Change, response: Response) -> EditReply:
    """Send a change to the writer. Without the caller's key it gets one, so that it can be repeated safely."""
    limit = backend.settings.limits.waiting_edits
    if backend.waiting >= limit:
        raise Problem(429, f"{limit} edits are waiting for the writer already", retry_after=1)
    backend.waiting += 1
    try:
        own_key = not change.key and not change.dry_run
        keyed = replace(change, key=f"own {uuid.uuid4().hex}") if own_key else change
        receipt = await backend.workers.ask_writer(keyed)
    finally:
        backend.waiting -= 1
    reply, replayed = receipt.reply, receipt.replayed and not own_key
    if reply.dry_run or replayed or not (reply.num_added or reply.removed):
        response.status_code = 200
    else:
        backend.metrics.facts.inc(reply.num_added)
        response.headers["Location"] = f"/v1/versions/{reply.version}"
    return reply


@router.get("/v1/edits", response_model=EditList, responses=problems(), dependencies=[requires("read")])
def list_edits(
    backend: BackendDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="only numbers below this one")] = None,
    state: Annotated[Literal["live", "all"], Query(description="edits of the live version, or all")] = "live",
) -> Any:
    """Edits, the newest first."""
    ledger = backend.ledger
    if state == "all":
        edits = ledger.edits(limit, before)
    else:
        members = ledger.edits_by_id(sorted(ledger.members(ledger.resolve(LIVE).id)))
        edits = [edit for edit in reversed(members) if before is None or edit.number < before][:limit]
    return {"edits": edit_rows(ledger, edits), "next": edits[-1].number if len(edits) == limit else None}


@router.get("/v1/edits/{id}", response_model=EditOut, responses=problems(404), dependencies=[requires("read")])
def get_edit(backend: BackendDep, id: EditId) -> Any:
    """One edit."""
    return edit_rows(backend.ledger, [backend.ledger.edit(id)])[0]


@router.delete("/v1/edits/{id}", status_code=201, response_model=EditReply, responses=problems(404, 409))
async def remove_edit(
    backend: BackendDep, id: EditId, response: Response, caller: Annotated[Caller, requires("edit")], key: Key = None
) -> Any:
    """Remove one edit exactly: a new version without it."""
    await to_thread(backend.ledger.edit, id)
    return await apply_change(backend, Change(caller.name, remove=(id,), key=key), response)


@router.get("/v1/jobs/{id}", response_model=JobOut, responses=problems(404), dependencies=[requires("edit")])
def get_job(backend: BackendDep, id: JobId) -> Any:
    """The progress of a large change."""
    return job_out(backend.jobs.get(id))


def job_out(job: Job) -> dict[str, Any]:
    """A job as its caller reads it."""
    outcome = {"result": None, "problem" if job.state == "failed" else "result": job.result}
    return {**vars(job), "state": "running" if job.state == "again" else job.state, **outcome}


def edit_rows(ledger: LedgerView, edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Edits as callers read them, each with its state in the live version."""
    live = ledger.resolve(LIVE).id
    held, ended = ledger.members(live), ledger.ended([edit.id for edit in edits])
    ancestors = ledger.ancestry(live) if ended else frozenset()
    rows = []
    for edit in edits:
        how = [kind for version, kind in ended.get(edit.id, ()) if version in ancestors]
        state = "live" if edit.id in held else how[-1] if how else "rolled_back"
        rows.append({**vars(edit), "state": state, **edit.report})
    return rows
