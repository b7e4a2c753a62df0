"""Records and the built-in world: `malmen data check`, `malmen world build`, `malmen world records`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from malmen.errors import EditError
from malmen.platform.cli.options import AsJson
from malmen.platform.cli.output import err, print_json
from malmen.platform.cli.output import out as console

data_app = typer.Typer(help="Files of edit records.", no_args_is_help=True)
world_app = typer.Typer(help="The built-in world: its language model and its records.", no_args_is_help=True)


@data_app.callback()
def _group() -> None:
    """With a callback, Typer keeps `check` as a command below `data`."""


@data_app.command("check")
def check_data(
    file: Annotated[Path, typer.Argument(help="the file to check")],
    format: Annotated[str, typer.Option(help="auto, malmen, zsre, counterfact or fever")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Check a file of edit records; each problem is reported with its line, field and remedy."""
    from malmen.data.check import check_file

    report = check_file(file, format)
    if as_json:
        print_json(report.as_dict())
    else:
        console.print(report.as_text(), markup=False, highlight=False)
    if not report.ok:
        raise typer.Exit(1)


@world_app.command("build")
def build_world(
    out: Annotated[Path, typer.Option(help="the model's folder")] = Path("runs/world_model"),
    seed: Annotated[int, typer.Option(help="of the weights and the order of facts")] = 2024,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the facts, at most")] = 15,
    as_json: AsJson = False,
) -> None:
    """Train the small language model of the built-in world again."""
    from malmen.data.built_models import build_world_model

    def on_epoch(epoch: int, loss: float, accuracy: float) -> None:
        err.print(f"epoch {epoch}/{epochs}  loss {loss:.4f}  facts known {100 * accuracy:.1f} %", highlight=False)

    manifest = build_world_model(out, seed=seed, max_epochs=epochs, on_epoch=on_epoch)
    if as_json:
        print_json(manifest)
    else:
        console.print(f"{out}: knows {100 * float(str(manifest['accuracy'])):.2f} % of {manifest['facts']} facts")
    if float(str(manifest["accuracy"])) < 0.99:
        raise EditError(f"the model in {out} knows less than 99 % of its facts; train it for more epochs")


@world_app.command("records")
def write_world_records(
    split: Annotated[Literal["train", "validation"], typer.Option(help="people of training, or those held out")],
    out: Annotated[Path, typer.Option(help="the file, JSONL")],
    seed: Annotated[int, typer.Option(help="of the new answers")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write edit records of the built-in world to a file: to read them, or to choose settings on people of training."""
    from malmen.data.readers import write_records
    from malmen.data.world import world_records

    records = world_records(split, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_records(out, records)
    if as_json:
        print_json({"file": str(out), "records": len(records)})
    else:
        console.print(f"{out}: {len(records)} records", highlight=False)
