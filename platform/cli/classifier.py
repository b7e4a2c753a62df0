"""`malmen classifier build`: BERT on FEVER, before it is edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from malmen.platform.cli.options import AsJson
from malmen.platform.cli.output import err, print_json
from malmen.platform.cli.output import out as console
from malmen.platform.cli.progress import counted

app = typer.Typer(help="A classifier of claims to edit.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """With a callback, Typer keeps `build` as a command below `classifier`."""


@app.command("build")
def build(
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
        err.print(f"epoch {epoch}/{epochs}  loss {loss:.4f}{share}", highlight=False)

    training = Training(epochs=epochs, lr=lr, batch_size=batch_size, seed=seed)
    with counted("training steps") as on_step:
        accuracy = build_classifier(
            model, train, out, validation=validation, training=training, device=device, on_epoch=on_epoch,
            on_step=on_step,
        )  # fmt: skip
    if as_json:
        print_json({"out": str(out), "validation_accuracy": accuracy})
    else:
        share = f": {100 * accuracy:.1f} % of the validation claims right" if accuracy is not None else ""
        console.print(f"{out}{share}. Next: malmen train bert-base model.name={out} data.train=…", highlight=False)
