"""The routes of versions, aliases, exports and the audit, of status and metrics, and of the console."""

from __future__ import annotations

import re
from asyncio import to_thread
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query
from fastapi.responses import FileResponse, PlainTextResponse, Response
from prometheus_client import generate_latest

from malmen.serve.http.access import Caller
from malmen.serve.http.api import CONSOLE, BackendDep, problems, requires
from malmen.serve.http.routes_edits import edit_rows
from malmen.serve.http.schemas import (
    AliasIn,
    AliasList,
    AuditOut,
    ExportIn,
    ExportOut,
    Name,
    VersionDetail,
    VersionList,
)
from malmen.serve.ledger.tables import LIVE, Alias, Version
from malmen.serve.ledger.view import LedgerView
from malmen.serve.messages import Export
from malmen.serve.problems import Problem

router = APIRouter(tags=["state"])
AliasName = Annotated[str, Path(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]


@router.get("/v1/versions", response_model=VersionList, responses=problems(), dependencies=[requires("read")])
def list_versions(
    backend: BackendDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> Any:
    """Versions, the newest first."""
    versions = backend.ledger.versions(limit, before)
    last = versions[-1].number if len(versions) == limit else 0
    return {"versions": _version_rows(backend.ledger, versions), "next": last or None}


@router.get("/v1/versions/{id}", response_model=VersionDetail, responses=problems(404), dependencies=[requires("read")])
def get_version(backend: BackendDep, id: Name) -> Any:
    """A version and what it changed."""
    ledger, version = backend.ledger, backend.ledger.resolve(id)
    how = ledger.changes(version.id)
    rows = [{**row, "how": how[row["id"]]} for row in edit_rows(ledger, ledger.edits_by_id(sorted(how)))]
    added, ended = ([row for row in rows if (row["how"] == "added") == new] for new in (True, False))
    return {**_version_rows(ledger, [version])[0], "added": added, "ended": ended}


@router.get("/v1/aliases", response_model=AliasList, responses=problems(), dependencies=[requires("read")])
def list_aliases(backend: BackendDep) -> Any:
    """All aliases; `live` is served by default, and the next edit builds on it."""
    return {"aliases": backend.ledger.aliases()}


@router.get("/v1/aliases/{name}", response_model=Alias, responses=problems(404), dependencies=[requires("read")])
def get_alias(backend: BackendDep, name: AliasName, response: Response) -> Any:
    """An alias, with its revision as the ETag."""
    alias = backend.ledger.alias(name)
    response.headers["ETag"] = f'"{alias.revision}"'
    return alias


@router.put("/v1/aliases/{name}", response_model=Alias, responses=problems(404, 409, 412, 428))
def move_alias(
    backend: BackendDep,
    name: AliasName,
    body: AliasIn,
    response: Response,
    caller: Annotated[Caller, requires("admin")],
    if_match: Annotated[str | None, Header(description="the alias's ETag; a new alias needs none")] = None,
) -> Any:
    """Move an alias, atomically: promote a version, or roll back to one."""
    seen = re.fullmatch(r'"?(\d{1,18})"?', if_match.strip()) if if_match is not None else None
    if if_match is not None and seen is None:
        raise Problem(412, f'cannot read If-Match {if_match!r}: expected the ETag of an alias, such as "3"')
    version = backend.ledger.resolve(body.version)
    moved = backend.ledger.set_alias(name, version.id, seen and int(seen[1]), caller.name)
    response.headers["ETag"] = f'"{moved.revision}"'
    return moved


@router.post("/v1/versions/{id}/export", status_code=201, response_model=ExportOut, responses=problems(404))
async def export(backend: BackendDep, id: Name, body: ExportIn, caller: Annotated[Caller, requires("admin")]) -> Any:
    """Write a version as a delta, a LoRA adapter or a merged checkpoint."""
    version = await to_thread(backend.ledger.resolve, id)
    manifest = await backend.workers.ask_writer(Export(version.id, body.kind, body.max_rank))
    folder = f"/v1/versions/{version.id}/export/{body.kind}"
    files = {name: f"{folder}/{name}" for name in (*manifest["files"], "manifest.json")}
    return {"version": version.id, "kind": body.kind, "files": files, "manifest": manifest}


@router.get(
    "/v1/versions/{id}/export/{kind}/{file}",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}, **problems(404)},
    dependencies=[requires("admin")],
)
def fetch_export(backend: BackendDep, id: Name, kind: Literal["delta", "lora", "merged"], file: Name) -> FileResponse:
    """A file of an export; its name is compared with the files that exist, so it is never used as a path."""
    folder = backend.settings.export_folder(backend.ledger.resolve(id).id, kind)
    if file not in {path.name for path in folder.glob("*") if path.is_file()}:
        raise Problem(404, f"file {file!r} of a {kind} export of {id} not found; POST …/export creates one")
    return FileResponse(folder / file, media_type="application/octet-stream")


@router.get("/v1/audit", response_model=AuditOut, responses=problems(), dependencies=[requires("admin")])
def audit(
    backend: BackendDep,
    after: Annotated[int, Query(ge=-1, le=2**31 - 1)] = -1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    verify: Annotated[bool, Query(description="verify the chain of hashes and all tables")] = False,
) -> Any:
    """Who did what, the oldest entry first."""
    entries = [vars(entry) for entry in backend.ledger.audit(after, limit)]
    intact = backend.ledger.verify()["intact"] if verify else None
    return {"entries": entries, "next": entries[-1]["seq"] if len(entries) == limit else None, "intact": intact}


@router.get("/v1/status", responses=problems())
async def status(backend: BackendDep, caller: Annotated[Caller, requires("read")]) -> dict[str, Any]:
    """What is live, which workers run, and what the caller may ask."""
    live = await to_thread(backend.ledger.resolve, LIVE)
    workers = await backend.workers.status()
    limits = backend.settings.limits
    return {
        "live": {"version": live.id, "number": live.number, "num_facts": live.num_facts},
        "base_model": backend.ledger.base_model,
        "editor": backend.ledger.editor,
        "writer": {"alive": workers.writer_alive, "waiting": backend.waiting},
        "readers": {"replicas": workers.readers, "running": workers.readers_running},
        "versions_in_memory": workers.versions_in_memory,
        "role": caller.scope,
        "limits": {name: getattr(limits, name) for name in ("facts_per_call", "max_tokens", "job_facts")},
    }


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {}}}, **problems()},
    dependencies=[requires("read")],
)
def metrics(backend: BackendDep) -> Response:
    """Numbers for Prometheus."""
    live = backend.ledger.resolve(LIVE)
    backend.metrics.live_facts.set(live.num_facts)
    backend.metrics.live_number.set(live.number)
    backend.metrics.waiting.set(backend.waiting)
    return Response(generate_latest(backend.metrics.registry), media_type="text/plain; version=0.0.4")


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """This process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: problems()[503]})
async def readyz(backend: BackendDep) -> dict[str, str]:
    """The ledger, the writer and a reader answer too."""
    await to_thread(backend.ledger.resolve, LIVE)
    workers = await backend.workers.status()
    if not workers.writer_alive or not workers.readers_running:
        raise Problem(503, "the writer or the readers have not started yet")
    return {"status": "ready"}


@router.get("/", include_in_schema=False)
async def console() -> FileResponse:
    """The console's page."""
    return FileResponse(CONSOLE / "index.html", media_type="text/html")


@router.get("/favicon.ico", include_in_schema=False)
async def favicon() -> Response:
    """None: browsers request it anyway."""
    return Response(status_code=204)


def _version_rows(ledger: LedgerView, versions: Sequence[Version]) -> list[dict[str, Any]]:
    """Versions as callers read them, each with its aliases."""
    names: dict[str, list[str]] = defaultdict(list)
    for alias in ledger.aliases():
        names[alias.version].append(alias.name)
    return [{**vars(version), "aliases": names[version.id], "guard": version.report} for version in versions]
