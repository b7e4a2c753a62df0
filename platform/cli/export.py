"""`malmen export`: an edit for programs that do not have malmen."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from malmen.errors import UsageError
from malmen.platform.cli.edit import load_edited_model
from malmen.platform.cli.options import AsJson, EditFolder, ModelName
from malmen.platform.cli.output import err, numbers_table, print_json
from malmen.platform.cli.output import out as console
from malmen.platform.cli.progress import slow_import, status


def export(
    edits: EditFolder,
    kind: Annotated[
        str, typer.Option(help="delta: what is added to the weights; lora: a PEFT adapter; merged: a whole checkpoint")
    ] = "delta",
    out: Annotated[Path, typer.Option(help="the folder for the export")] = Path("runs/export"),
    max_rank: Annotated[
        int, typer.Option(min=1, help="lora: the largest rank of a layer; the error of what it leaves out is reported")
    ] = 512,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Write an edit as a delta, a LoRA adapter or a merged checkpoint that loads without malmen.

    Only a classifier's needs malmen, for its class malmen.lm.FirstTokenClassifier.
    """
    slow_import("malmen.export")
    from malmen.export import MANIFEST, ExportKind, export_edit
    from malmen.runs.files import check_replaceable

    if kind not in get_args(ExportKind):
        raise UsageError(f"unknown --kind {kind!r}: expected {', '.join(get_args(ExportKind))}")
    check_replaceable(out, MANIFEST)
    lm, shifts, edit = load_edited_model(edits, model)
    # DeepSpeed, which transformers imports to save a model, writes its warnings to standard output.
    with status(f"writing {len(shifts)} layers as {kind}"), redirect_stdout(sys.stderr):
        manifest = export_edit(
            cast(ExportKind, kind),
            out,
            lm,
            shifts,
            facts=edit.get("facts", []),
            model_name=model or edit["model"]["name"],
            max_rank=max_rank,
            info={name: edit[name] for name in ("model", "data", "editor", "scores") if name in edit},
        )
    if as_json:
        print_json({"out": str(out), **manifest})
        return
    _show_export(manifest, out)


def _show_export(manifest: dict[str, Any], out: Path) -> None:
    """The files with their sizes, and the layers with their ranks and errors."""
    title = f"{out}: {len(manifest['facts'])} facts as {manifest['kind']}"
    files = [(name, f"{file['bytes']:,}") for name, file in manifest["files"].items()]
    console.print(numbers_table(title, ("file", "bytes"), files))
    headings = {"ratio": "‖S‖/‖W‖", "rank": "rank", "relative_error": "error", "rounding_error": "lost by rounding"}
    tensors = manifest["tensors"]
    columns = {name: text for name, text in headings.items() if any(name in row for row in tensors.values())}
    rows = [(weight, *(_number(row[name]) for name in columns)) for weight, row in tensors.items()]
    console.print(numbers_table("", ("weight", *columns.values()), rows))
    full_ranks = [row["full_rank"] for row in tensors.values() if row.get("full_rank", 0) > row.get("rank", 0)]
    if full_ranks:
        err.print(
            f"{len(full_ranks)} layers were cut to the rank of --max-rank; --max-rank {max(full_ranks)} is exact."
        )
    err.print(f"{out}/README.md says how to load it.", soft_wrap=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
