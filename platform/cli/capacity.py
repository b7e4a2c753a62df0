"""`malmen capacity`: how many facts an editor holds, kept with the editor."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmen.errors import UsageError
from malmen.platform.cli.options import REGISTRY, AsJson, ModelName, PlacementOverrides
from malmen.platform.cli.output import err, numbers_table, out, percent, print_json
from malmen.platform.cli.progress import counted, status

if TYPE_CHECKING:
    from malmen.measure.capacity import CapacityPoint

CAPACITY_FILE = "capacity.json"  # in a checkpoint's folder


def capacity(
    editor: Annotated[
        str,
        typer.Option(
            help="a run or checkpoint of `malmen train`, RUN@best, or models:/NAME/VERSION or @ALIAS of the registry, "
            "which does not keep the curve"
        ),
    ],
    overrides: PlacementOverrides = None,
    sizes: Annotated[str, typer.Option(help="numbers of facts to measure at, e.g. 1,16,256")] = "1,4,16,64,256",
    records: Annotated[Path | None, typer.Option(help="records to edit; default: the run's validation data")] = None,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Add held-out facts one after the other and measure how many hold, up to which number; keep the curve with the
    editor."""
    numbers = _sizes(sizes)
    from malmen.data.readers import read_records
    from malmen.data.splits import validation_records
    from malmen.editor import Editor
    from malmen.measure.capacity import capacity_curve
    from malmen.platform.cli.edit import load_method
    from malmen.runs.checkpoint_lookup import latest_checkpoint
    from malmen.runs.storage import RunStore

    # Training may continue and write newer checkpoints: the curve goes to the one that is measured.
    checkpoint = None if editor.startswith(REGISTRY) else latest_checkpoint(editor)
    loaded = load_method(None, str(checkpoint or editor), None, overrides or [], model)
    assert isinstance(loaded.method, Editor)
    with status("reading the records"):
        held_out = read_records(records, "auto") if records else validation_records(loaded.config)
    with counted(f"adding up to {numbers[-1]} facts and measuring") as on_progress:
        curve = capacity_curve(
            loaded.lm, loaded.method, held_out, loaded.config, numbers, on_progress=on_progress
        )  # fmt: skip
    rows = [asdict(point) for point in curve]
    if as_json:
        print_json(rows)
    else:
        out.print(_table(curve))
    if checkpoint is None:
        err.print(f"The curve was not kept: {editor} is in the registry", soft_wrap=True)
        return
    store = RunStore(checkpoint)
    store.write_text(CAPACITY_FILE, json.dumps({"records": str(records or ""), "curve": rows}) + "\n")
    if not as_json:
        err.print(f"The curve is in {store.join(CAPACITY_FILE)}", soft_wrap=True)


def _sizes(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UsageError(f"cannot read --sizes {text!r}: expected numbers of facts with commas, e.g. 1,16,256")
    return numbers


def _table(curve: list[CapacityPoint]) -> Any:
    forms = list(curve[0].drift)
    headings = ["facts", "hold", "rephrasings", "unrelated kept", "largest ‖S‖/‖W‖"]
    headings += [f"{name}, {form}" for form in forms for name in ("KL", "20 tokens unchanged")]
    lines = []
    for point in curve:
        shares = map(percent, (point.holding, point.rephrasings_holding, point.unrelated_kept))
        drifts = [
            text for form in forms for text in (f"{point.drift[form].kl:.4f}", percent(point.drift[form].unchanged_20))
        ]
        lines.append((str(point.facts), *shares, f"{point.max_shift_ratio:.2f}", *drifts))
    return numbers_table("facts in the set, and what they do (in % where no unit is said)", headings, lines)
