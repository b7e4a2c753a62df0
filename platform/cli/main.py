"""The command `malmen`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from malmen import __version__
from malmen.errors import EditError, UsageError
from malmen.platform.cli.classifier import app as classifier_app
from malmen.platform.cli.edit import edit, evaluate, generate
from malmen.platform.cli.export import export
from malmen.platform.cli.options import CONFIGS, AsJson, Overrides, resolve_config
from malmen.runs.files import exclusive_folder

if TYPE_CHECKING:
    from malmen.config import Config

app = typer.Typer(
    help="Rewrite facts inside a language model (MALMEN).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Edit records.", no_args_is_help=True)
world_app = typer.Typer(help="The built-in world.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(world_app, name="world")
app.add_typer(classifier_app, name="classifier")


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="a YAML file, or a shipped config (`malmen configs` lists them)")],
    overrides: Overrides = None,
    out: Annotated[str, typer.Option(help="the run's folder, or a storage URL such as s3://bucket/run")] = "runs/train",
    resume: Annotated[bool, typer.Option("--resume", help="there must be a run in --out to go on with")] = False,
    method: Annotated[
        Literal["malmen", "mend"], typer.Option(help="mend: the same hyper-network, its shifts summed, of all tokens")
    ] = "malmen",
    local: Annotated[bool, typer.Option("--local", help="in this one process, without Ray and MLflow")] = False,
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster (HOST:PORT or `auto`); default: RAY_ADDRESS, else a local one")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Meta-train an editor on a Ray cluster; ends with an evaluation on held-out records.

    The same command again goes on with an unfinished run, to the same editor as without the interruption.
    """
    from malmen.config import load_config
    from malmen.methods.mend import mend_settings

    settings = load_config(resolve_config(config), overrides or [])
    if method == "mend":
        settings = load_config(resolve_config(config), overrides or [], mend_settings(settings))
    if local and address:
        raise UsageError("--local and --address exclude each other")
    with exclusive_folder(out):
        (_train_local if local else _train_platform)(settings, out, resume, address, as_json)


def _train_local(settings: Config, out: str, resume: bool, _address: str | None, as_json: bool) -> None:
    from malmen.data.splits import validation_records
    from malmen.platform.cli.output import err, show_training, training_progress
    from malmen.training import evaluate_editor
    from malmen.training import train as run_training

    if "://" in out:
        raise UsageError(f"--local writes to a folder; given {out!r}")
    with training_progress(settings.training.steps) as progress:
        run = run_training(settings, Path(out), resume=resume, on_step=progress.step, on_evaluation=progress.evaluation)
    with err.status("editing held-out records and measuring"):
        scores = evaluate_editor(run.lm, run.editor, validation_records(settings), settings).scores()
    facts = {"seconds": round(run.seconds, 1), "steps": run.editor.steps_done, "editor": out}
    show_training(scores, facts, run.history, as_json)


def _train_platform(settings: Config, out: str, resume: bool, address: str | None, as_json: bool) -> None:
    from malmen.platform.cli.output import show_training, training_progress
    from malmen.platform.train import Listener
    from malmen.platform.train import train as run_training
    from malmen.runs.checkpoint_lookup import best_checkpoint

    with training_progress(settings.training.steps) as progress:
        listener = Listener(progress.step, progress.evaluation, progress.event)
        trained = run_training(settings, out, address=address, resume=resume, listener=listener)
    best = best_checkpoint(out)
    facts: dict[str, Any] = {
        "best": str(best) if str(best) != str(trained.checkpoint) else None,
        "seconds": round(trained.seconds, 1),
        "steps": trained.steps,
        "editor": out,
        "tracking_run": trained.tracking_run,
        "registered": trained.registered.uri if trained.registered else None,
    }
    show_training(trained.scores, facts, trained.history, as_json)


app.command("edit")(edit)
app.command("eval")(evaluate)
app.command("generate")(generate)
app.command("export")(export)


@app.command()
def quickstart(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="the run's folder, replaced")] = Path("runs/quickstart"),
    as_json: AsJson = False,
) -> None:
    """Meta-train on the built-in world, edit held-out facts, show before and after."""
    from malmen.platform.cli.quickstart import run_quickstart

    with exclusive_folder(out):
        run_quickstart(resolve_config("builtin"), overrides or [], out, as_json=as_json)


@app.command("plan")
def plan_command(
    config: Annotated[str, typer.Argument(help="a YAML file, or a shipped config")],
    overrides: Overrides = None,
    flops: Annotated[
        float | None, typer.Option(min=0.001, help="GFLOP/s of a large product in the LM's type, on one process")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure that rate here instead")] = False,
    lm_memory: Annotated[float | None, typer.Option(min=0, help="GB that each LM worker has")] = None,
    hypernet_memory: Annotated[float | None, typer.Option(min=0, help="GB that each hypernet actor has")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=0.001, help="GB/s between processes; default 1.25")] = None,
    gather_bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s among LM workers; default 1.25, on GPUs 100")
    ] = None,
    fact_tokens: Annotated[int | None, typer.Option(min=2, help="tokens of a fact; default: from the data")] = None,
    answer_tokens: Annotated[int | None, typer.Option(min=1, help="of these, the answer's")] = None,
    as_json: AsJson = False,
) -> None:
    """What a run will need, before anything runs: memory, transfers, time; exit code 1 if it does not fit."""
    from malmen.config import load_config
    from malmen.platform.plan.output import run_plan
    from malmen.platform.plan.planner import PlanOptions

    if flops is not None and measure:
        raise UsageError("--flops and --measure exclude each other")
    settings = load_config(resolve_config(config), overrides or [])
    options = PlanOptions(
        lm_memory, hypernet_memory, flops, measure, bandwidth, gather_bandwidth, fact_tokens, answer_tokens
    )
    if not run_plan(settings, options, as_json):
        raise typer.Exit(1)


@app.command()
def configs() -> None:
    """List the shipped configs."""
    from malmen.platform.cli.output import out as console

    for path in sorted(CONFIGS.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        console.print(f"{path.stem:14} {first}", highlight=False)


@app.command()
def settings(as_json: AsJson = False) -> None:
    """List every setting with its default; any can be given as key=value."""
    from malmen.config import describe_settings
    from malmen.platform.cli.output import show_settings

    show_settings(describe_settings(), as_json)


@data_app.command("check")
def data_check(
    file: Annotated[Path, typer.Argument(help="the file to check")],
    format: Annotated[str, typer.Option(help="auto, malmen, zsre, counterfact or fever")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with a file of edit records, with line, field and remedy."""
    from malmen.data.check import check_file
    from malmen.platform.cli.output import out as console
    from malmen.platform.cli.output import print_json

    report = check_file(file, format)
    if as_json:
        print_json(report.as_dict())
    else:
        console.print(report.as_text(), markup=False, highlight=False)
    if not report.ok:
        raise typer.Exit(1)


@world_app.command("build")
def world_build(
    out: Annotated[Path, typer.Option(help="where the model folder goes")] = Path("runs/world_model"),
    seed: Annotated[int, typer.Option(help="of weights and data order")] = 2024,
    epochs: Annotated[int, typer.Option(min=1)] = 15,
    as_json: AsJson = False,
) -> None:
    """Train the small language model of the built-in world again."""
    from malmen.data.world_model import build_world_model
    from malmen.platform.cli.output import err, print_json
    from malmen.platform.cli.output import out as console

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
def world_write(
    split: Annotated[Literal["train", "validation"], typer.Option(help="people of training, or those held out")],
    out: Annotated[Path, typer.Option(help="the file, JSONL")],
    seed: Annotated[int, typer.Option(help="of the new answers")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write edit records of the built-in world to a file: to look at, or to choose settings on people of training."""
    from malmen.data.readers import write_records
    from malmen.data.world import world_records
    from malmen.platform.cli.output import out as console
    from malmen.platform.cli.output import print_json

    records = world_records(split, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_records(out, records)
    if as_json:
        print_json({"file": str(out), "records": len(records)})
    else:
        console.print(f"{out}: {len(records)} records", highlight=False)


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log what happens")] = False,
    _show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # both are read when transformers is imported
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def add_commands(name: str, commands: typer.Typer) -> None:
    """Commands of another room, under a name; a second time changes nothing."""
    if name not in {group.name for group in app.registered_groups}:
        app.add_typer(commands, name=name)


def add_entry_points() -> None:
    """Commands of the rooms that platform/ may not import. Their modules load what they need when a command runs."""
    for entry in entry_points(group="malmen.commands"):
        add_commands(entry.name, entry.load())


def main(first: Sequence[str] = ()) -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage. `first` goes before the arguments of the command line."""
    add_entry_points()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is open is closed, and runs are ended
    try:
        app([*first, *sys.argv[1:]])  # wrong usage exits with 2 by itself
    except EditError as error:
        print(f"malmen: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"malmen: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
