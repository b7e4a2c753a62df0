"""What runs start from: `malmen data check`, `malmen world build` and `records`, `malmen classifier build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from malmen.errors import EditError
from malmen.platform.cli.options import AsJson
from malmen.platform.cli.output import err, show
from malmen.platform.cli.progress import counted, status

data_app = typer.Typer(help="Files of edit records.", no_args_is_help=True)
world_app = typer.Typer(help="The built-in world: its language model and its records.", no_args_is_help=True)
classifier_app = typer.Typer(help="A classifier of claims to edit.", no_args_is_help=True)


@classifier_app.callback()
@data_app.callback()
def _group() -> None:
    """With a callback, Typer keeps a single command below its group."""


@data_app.command("check")
def check_data(
    file: Annotated[Path, typer.Argument(help="the file to check")],
    format: Annotated[str, typer.Option(help="auto, malmen, zsre, counterfact or fever")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Check a file of edit records; each problem is reported with its line, field and remedy."""
    from malmen.data.check import check_file

    with status(f"checking {file}", announced=False):
        report = check_file(file, format)
    show(report.as_dict(), report.as_text(), as_json)
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
        err.print(f"epoch {epoch}/{epochs}  loss {loss:.4f}  facts known {100 * accuracy:.1f} %")

    with status("training the model of the built-in world"):
        manifest = build_world_model(out, seed=seed, max_epochs=epochs, on_epoch=on_epoch)
    accuracy = float(str(manifest["accuracy"]))
    show(manifest, f"{out}: knows {100 * accuracy:.2f} % of {manifest['facts']} facts", as_json)
    if accuracy < 0.99:
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
    show({"file": str(out), "records": len(records)}, f"{out}: {len(records)} records", as_json)


@classifier_app.command("build")
def build_claims_classifier(
    train: Annotated[Path, typer.Option(help="claims with labels, or FEVER edit records; see docs/data.md")],
    model: Annotated[str, typer.Option(help="a BERT: a folder or a hub name")] = "bert-base-uncased",
    validation: Annotated[Path | None, typer.Option(help="claims to measure on after each epoch")] = None,
    out: Annotated[Path, typer.Option(help="the model's folder")] = Path("models/bert-base-fever"),
    epochs: Annotated[int, typer.Option(min=1, help="passes over the claims; default: the paper's")] = 2,
    lr: Annotated[float, typer.Option(min=0, help="of Adam; default: the paper's")] = 3e-5,
    batch_size: Annotated[int, typer.Option(min=1, help="claims per step; the paper does not state it")] = 32,
    seed: Annotated[int, typer.Option(help="of the head's weights and the order of claims")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Fine-tune all of a BERT and a fresh head to tell true claims from false ones (the paper's appendix)."""
    from malmen.data.built_models import Training, build_classifier

    def on_epoch(epoch: int, loss: float, accuracy: float | None) -> None:
        share = f"  right {100 * accuracy:.1f} %" if accuracy is not None else ""
        err.print(f"epoch {epoch}/{epochs}  loss {loss:.4f}{share}")

    training = Training(epochs=epochs, lr=lr, batch_size=batch_size, seed=seed)
    with counted("training steps") as on_step:
        accuracy = build_classifier(
            model, train, out, validation=validation, training=training, device=device, on_epoch=on_epoch,
            on_step=on_step,
        )  # fmt: skip
    share = f": {100 * accuracy:.1f} % of the validation claims right" if accuracy is not None else ""
    text = f"{out}{share}. Next: malmen train bert-base model.name={out} data.train=…"
    show({"out": str(out), "validation_accuracy": accuracy}, text, as_json)
