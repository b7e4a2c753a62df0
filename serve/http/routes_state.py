"""Versions, aliases, exports, the audit, the console, and whether all is well."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.responses import FileResponse, PlainTextResponse, Response

from malmen.serve.exports import exported_file
from malmen.serve.http.access import Caller
from malmen.serve.http.api import CONSOLE, Backend, allowed, backend, in_thread, problems
from malmen.serve.http.problems import Problem
from malmen.serve.http.routes_edits import described
from malmen.serve.http.schemas import (
    AliasIn,
    AliasList,
    AliasOut,
    AuditOut,
    ExportIn,
    ExportOut,
    Name,
    VersionDetail,
    VersionList,
)
from malmen.serve.ledger.tables import LIVE
from malmen.serve.ledger.view import LedgerView, Version

router = APIRouter(tags=["state"])
At = Annotated[Backend, Depends(backend)]
_ASSETS = {"console.js": "text/javascript", "api.js": "text/javascript", "console.css": "text/css"}
AliasName = Annotated[str, Path(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]


@router.get("/v1/versions", response_model=VersionList, responses=problems(), dependencies=[allowed("read")])
async def list_versions(
    at: At,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> Any:
    """Versions, the newest first."""
    found = await in_thread(at.ledger.versions, limit, before)
    names = await in_thread(_alias_names, at.ledger)
    return {
        "versions": [_version(one, names) for one in found],
        "next": found[-1].number if len(found) == limit and found[-1].number else None,
    }


@router.get("/v1/versions/{id}", response_model=VersionDetail, responses=problems(404), dependencies=[allowed("read")])
async def get_version(at: At, id: Name) -> Any:
    """A version, and what it changed."""
    return await in_thread(_detail, at.ledger, id)


@router.get("/v1/aliases", response_model=AliasList, responses=problems(), dependencies=[allowed("read")])
async def list_aliases(at: At) -> Any:
    """All aliases; `live` is what is served by default, and what the next edit builds on."""
    return {"aliases": [vars(alias) for alias in await in_thread(at.ledger.aliases)]}


@router.get("/v1/aliases/{name}", response_model=AliasOut, responses=problems(404), dependencies=[allowed("read")])
async def get_alias(at: At, name: AliasName, response: Response) -> Any:
    """An alias, with its revision as the ETag."""
    found = await in_thread(at.ledger.alias, name)
    if found is None:
        raise Problem(404, f"there is no alias {name!r}")
    response.headers["ETag"] = f'"{found.revision}"'
    return vars(found)


@router.put("/v1/aliases/{name}", response_model=AliasOut, responses=problems(404, 409, 412, 428))
async def move_alias(
    at: At,
    name: AliasName,
    asked: AliasIn,
    response: Response,
    caller: Annotated[Caller, allowed("admin")],
    if_match: Annotated[str | None, Header(description="the alias's ETag; only a new alias needs none")] = None,
) -> Any:
    """Promote a version or roll back to one: a name moves, at once."""
    revision = _revision(if_match)
    version = await in_thread(at.ledger.resolve, asked.version)
    moved = await in_thread(at.ledger.set_alias, name, version.id, revision, caller.name)
    response.headers["ETag"] = f'"{moved.revision}"'
    return vars(moved)


@router.post("/v1/versions/{id}/export", status_code=201, response_model=ExportOut, responses=problems(404))
async def export(at: At, id: Name, asked: ExportIn, caller: Annotated[Caller, allowed("admin")]) -> Any:
    """Write a version as a delta, a LoRA adapter or a merged checkpoint."""
    version = await in_thread(at.ledger.resolve, id)
    manifest = await at.roles.export(version.id, asked.kind, asked.max_rank)
    folder = f"/v1/versions/{version.id}/export/{asked.kind}"
    files = {name: f"{folder}/{name}" for name in (*manifest["files"], "manifest.json")}
    return {"version": version.id, "kind": asked.kind, "files": files, "manifest": manifest}


@router.get(
    "/v1/versions/{id}/export/{kind}/{file}",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}, **problems(404)},
    dependencies=[allowed("admin")],
)
async def fetch_export(at: At, id: Name, kind: Literal["delta", "lora", "merged"], file: Name) -> FileResponse:
    """A file of an export."""
    found = await in_thread(exported_file, at.ledger, at.settings.store, id, kind, file)
    return FileResponse(found, media_type="application/octet-stream")


@router.get("/v1/audit", response_model=AuditOut, responses=problems(), dependencies=[allowed("admin")])
async def audit(
    at: At,
    after: Annotated[int, Query(ge=-1, le=2**31 - 1)] = -1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    verify: Annotated[bool, Query(description="check the whole chain of hashes")] = False,
) -> Any:
    """Who did what, from the oldest entry on."""
    found = await in_thread(at.ledger.audit, after, limit)
    intact = (await in_thread(at.ledger.verify))["intact"] if verify else None
    return {
        "entries": [vars(entry) for entry in found],
        "next": found[-1].seq if len(found) == limit else None,
        "intact": intact,
    }


@router.get("/v1/status", responses=problems())
async def status(at: At, caller: Annotated[Caller, allowed("read")]) -> dict[str, Any]:
    """What is live, who is there, and what may be asked."""
    live = await in_thread(at.ledger.resolve, LIVE)
    roles = await at.roles.status()
    roles["writer"]["waiting"] = at.waiting
    limits = at.settings.limits
    return {
        "live": {"version": live.id, "number": live.number, "num_facts": live.num_facts},
        "base_model": at.ledger.base_model,
        "editor": at.ledger.editor,
        **roles,
        "role": caller.role,
        "limits": {name: getattr(limits, name) for name in ("facts_per_call", "max_tokens", "job_facts")},
    }


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {}}}, **problems()},
    dependencies=[allowed("read")],
)
async def metrics(at: At) -> Response:
    """For Prometheus."""
    live = await in_thread(at.ledger.resolve, LIVE)
    at.meters.live_facts.set(live.num_facts)
    at.meters.live_number.set(live.number)
    return Response(at.meters.text(), media_type="text/plain; version=0.0.4")


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """This process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: problems()[503]})
async def readyz(at: At) -> dict[str, str]:
    """The ledger, the writer and a reader answer too."""
    await in_thread(at.ledger.resolve, LIVE)
    roles = await at.roles.status()
    if not roles["writer"]["alive"] or not roles["readers"]["running"]:
        raise Problem(503, "the writer or the readers are not there yet")
    return {"status": "ready"}


@router.get("/", include_in_schema=False)
async def console() -> FileResponse:
    """The page."""
    return FileResponse(CONSOLE / "index.html", media_type="text/html")


@router.get("/console/{name}", include_in_schema=False)
async def asset(name: str) -> Response:
    """What the page loads."""
    if name not in _ASSETS:
        raise Problem(404, f"the console has no {name!r}")
    return FileResponse(CONSOLE / name, media_type=_ASSETS[name])


@router.get("/favicon.ico", include_in_schema=False)
async def favicon() -> Response:
    """Browsers ask for it."""
    return Response(status_code=204)


def _revision(if_match: str | None) -> int | None:
    if if_match is None:
        return None
    found = re.fullmatch(r'"?(\d{1,18})"?', if_match.strip())
    if found is None:
        raise Problem(412, f'cannot read If-Match {if_match!r}: expected the ETag of an alias, such as "3"')
    return int(found[1])


def _alias_names(ledger: LedgerView) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for alias in ledger.aliases():
        names.setdefault(alias.version, []).append(alias.name)
    return names


def _version(version: Version, names: dict[str, list[str]]) -> dict[str, Any]:
    shown = {name: getattr(version, name) for name in ("id", "number", "parent", "num_facts", "actor", "at")}
    return {**shown, "aliases": names.get(version.id, []), "guard": version.report}


def _detail(ledger: LedgerView, name: str) -> dict[str, Any]:
    version = ledger.resolve(name)
    how = dict(ledger.changes(version.id))
    rows = described(ledger, ledger.edits_by_id(sorted(how)))
    return {
        **_version(version, _alias_names(ledger)),
        "added": [row for row in rows if how[row["id"]] == "added"],
        "ended": [{**row, "how": how[row["id"]]} for row in rows if how[row["id"]] != "added"],
    }
