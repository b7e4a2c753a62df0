"""`malmen classifier build`: BERT on FEVER, before it is edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from malmen.platform.cli.options import AsJson

app = typer.Typer(help="A classifier of claims, to be edited.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """So that `build` is a command of its own."""


@app.command("build")
def build(
    train: Annotated[Path, typer.Option(help="claims with labels, or FEVER edit records; see docs/data.md")],
    model: Annotated[str, typer.Option(help="a BERT: a folder or a hub name")] = "bert-base-uncased",
    validation: Annotated[Path | None, typer.Option(help="claims to measure on after each epoch")] = None,
    out: Annotated[Path, typer.Option(help="where the model folder goes")] = Path("models/bert-base-fever"),
    epochs: Annotated[int, typer.Option(min=1, help="over the claims; the paper's")] = 2,
    lr: Annotated[float, typer.Option(min=0, help="Adam's; the paper's")] = 3e-5,
    batch_size: Annotated[int, typer.Option(min=1, help="claims per step; the paper does not say")] = 32,
    seed: Annotated[int, typer.Option(help="of the head and the order")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Fine-tune all of a BERT and a fresh head to tell true claims from false ones (the paper's appendix)."""
    from rich.progress import Progress

    from malmen.data.claims_model import ClaimsTraining, build_classifier
    from malmen.platform.cli.output import err, print_json
    from malmen.platform.cli.output import out as console

    def on_epoch(epoch: int, loss: float, right: float | None) -> None:
        told = f"  right {100 * right:.1f} %" if right is not None else ""
        err.print(f"epoch {epoch}/{epochs}  loss {loss:.4f}{told}", highlight=False)

    training = ClaimsTraining(epochs=epochs, lr=lr, batch_size=batch_size, seed=seed)
    with Progress(console=err, disable=not err.is_terminal) as progress:
        task = progress.add_task("steps", total=None)
        accuracy = build_classifier(
            model, train, out, validation=validation, training=training, device=device, on_epoch=on_epoch,
            on_step=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    if as_json:
        print_json({"out": str(out), "validation_accuracy": accuracy})
    else:
        told = f": {100 * accuracy:.1f} % of the validation claims right" if accuracy is not None else ""
        console.print(f"{out}{told}. Next: malmen train bert-base model.name={out} data.train=…", highlight=False)
