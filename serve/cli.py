"""`malmen serve`: the endpoint on a local Ray, or on a cluster."""

from __future__ import annotations

import re
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from malmen.errors import EditError
from malmen.platform.cli.options import REGISTRY, Address, AsJson, RunByDefault
from malmen.platform.cli.progress import slow_import, status

if TYPE_CHECKING:
    from malmen.serve.settings import ServeConfig

app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    help="Serve a model with live edits: `malmen serve --editor DIR`. Options: `malmen serve run --help`.",
)


@app.command("run")
def run(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="settings as key=value; `malmen serve settings` lists them")
    ] = None,
    editor: Annotated[
        str | None,
        typer.Option(help="a run's folder, RUN@best, a checkpoint, models:/NAME/VERSION or models:/NAME@ALIAS"),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="folder of ledger, versions and tokens; default: runs/serve")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="a YAML file of settings")] = None,
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="the port to listen on")] = 8000,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model with live edits: add facts, ask, remove them. http://HOST:PORT/ is a web console.

    Runs until Ctrl-C. The same command resumes with all edits.
    """
    from malmen.serve.settings import load_settings

    loaded = load_settings(config, overrides or [], editor=editor, store=store)
    _serve(_absolute_paths(loaded), host, port, address, as_json)


def _serve(settings: ServeConfig, host: str, port: int, address: str | None, as_json: bool) -> None:
    slow_import("ray.serve", "malmen.serve.app")
    from ray import serve as ray_serve

    from malmen.config import ClusterConfig
    from malmen.platform.cli.output import err, print_json
    from malmen.platform.cluster import connected
    from malmen.serve.app import start_endpoint
    from malmen.serve.http.access import load_access, token_of
    from malmen.serve.ledger.opening import open_ledger, pin_editor

    settings = pin_editor(settings)
    open_ledger(settings).close()  # a wrong editor or store is refused before anything starts
    load_access(settings.tokens_file)
    stopped = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stopped.set())
    with ExitStack() as at_end:
        with status("starting Ray, the writer and the readers"):
            at_end.enter_context(connected(address, ClusterConfig()))
            url = start_endpoint(settings, host, port, stopped)
        for name in (signal.SIGINT, signal.SIGTERM):  # Ray has replaced them
            signal.signal(name, lambda *_: stopped.set())
        if as_json:
            print_json({"url": url, "tokens": str(settings.tokens_file), "store": settings.store})
        err.print(f"Serving at {url}; the tokens are in {settings.tokens_file}")
        if err.is_terminal:  # a log is no place for a token
            page = f"{url}/#token={token_of(settings.tokens_file, 'admin')}"
            err.print(f"Web console: {page}", soft_wrap=True)
        stopped.wait()
        err.print("Stopping.")
        ray_serve.shutdown()  # the store keeps everything


def _absolute_paths(settings: ServeConfig) -> ServeConfig:
    """Ray's processes run in other folders."""
    from malmen.runs.checkpoint_lookup import BEST
    from malmen.serve.settings import parse_settings

    raw = settings.model_dump(mode="json")
    paths = [(raw, "store"), (raw, "tokens"), (raw["guard"], "probes")]
    if "://" not in settings.editor and not settings.editor.startswith(REGISTRY):
        if not Path(settings.editor.removesuffix(BEST)).exists():
            raise EditError(f"no editor in {settings.editor}: expected a folder that `malmen train` writes")
        paths.append((raw, "editor"))
    if settings.model and Path(settings.model).expanduser().exists():
        paths.append((raw, "model"))
    for values, key in paths:
        values[key] = values[key] and str(Path(values[key]).expanduser().absolute())
    if settings.database and re.match(r"sqlite:///[^/]", settings.database):
        raw["database"] = f"sqlite:///{Path(settings.database.removeprefix('sqlite:///')).absolute()}"
    return parse_settings(raw, "the settings")


@app.command("settings")
def settings(as_json: AsJson = False) -> None:
    """List every setting of the endpoint with its default; any can be given as key=value."""
    from malmen.config import describe_settings
    from malmen.platform.cli.output import show_settings
    from malmen.serve.settings import ServeConfig

    rows = describe_settings(ServeConfig)
    show_settings([{**row, "default": None if row["key"] == "editor" else row["default"]} for row in rows], as_json)


@app.command("audit")
def audit(
    store: Annotated[str, typer.Option(help="the endpoint's folder")] = "runs/serve",
    database: Annotated[
        str | None, typer.Option(help="URL of the ledger's database; default: sqlite in the store")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify that no entry of the ledger and no edit was changed. Exit code 1 if one was."""
    from malmen.platform.cli.output import out, print_json
    from malmen.serve.ledger.view import LedgerView
    from malmen.serve.settings import ServeConfig

    if database is None and not (Path(store) / "ledger.db").is_file():
        raise EditError(f"no ledger in {store}: expected ledger.db, which `malmen serve` creates")
    url = ServeConfig(editor="", store=store, database=database).database_url
    with status("verifying the ledger", announced=False):
        result = LedgerView(url).verify()
    if as_json:
        print_json(result)
    elif result["intact"]:
        out.print(f"{result['entries']} entries, the last with hash {result['head'][:16]}…: none was changed")
    if not result["intact"]:
        entry = result["broken_at"]
        raise EditError(
            f"the ledger was changed: entry {entry} is not as it was written"
            if entry is not None
            else f"the ledger was changed: its end or these rows contradict the entries: {result['differing']}"
        )
