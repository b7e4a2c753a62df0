"""The command `malmen`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmen import __version__
from malmen.errors import EditError, UsageError

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

CONFIGS = Path(__file__).parent / "configs"

Overrides = Annotated[list[str] | None, typer.Argument(help="settings as key=value, e.g. training.steps=100")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]
EditorFolder = Annotated[
    str,
    typer.Option("--editor", help="a run or checkpoint of `malmen train`, or models:/NAME/VERSION of the registry"),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="the base model, where it lies elsewhere than in training")
]


def resolve_config(name: str) -> Path:
    """A config file by path, or one that is shipped by name."""
    if Path(name).is_file():
        return Path(name)
    shipped = CONFIGS / f"{name}.yaml"
    if not shipped.exists():
        known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        raise UsageError(f"no config {name!r}: neither a file nor one of those shipped ({known})")
    return shipped


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="a YAML file, or a shipped config (`malmen configs` lists them)")],
    overrides: Overrides = None,
    out: Annotated[str, typer.Option(help="the run's folder, or a storage URL such as s3://bucket/run")] = "runs/train",
    resume: Annotated[bool, typer.Option("--resume", help="there must be a run in --out to go on with")] = False,
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

    settings = load_config(resolve_config(config), overrides or [])
    if local and address:
        raise UsageError("--local and --address exclude each other")
    (_train_local if local else _train_platform)(settings, out, resume, address, as_json)


def _train_local(settings: Config, out: str, resume: bool, _address: str | None, as_json: bool) -> None:
    from malmen.platform.output import err, show_training, training_progress
    from malmen.sampling import validation_records
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
    from malmen.platform.output import show_training, training_progress
    from malmen.platform.train import Listener
    from malmen.platform.train import train as run_training

    with training_progress(settings.training.steps) as progress:
        listener = Listener(progress.step, progress.evaluation, progress.event)
        trained = run_training(settings, out, address=address, resume=resume, listener=listener)
    facts: dict[str, Any] = {
        "seconds": round(trained.seconds, 1),
        "steps": trained.steps,
        "editor": out,
        "tracking_run": trained.tracking_run,
        "registered": trained.registered.uri if trained.registered else None,
    }
    show_training(trained.scores, facts, trained.history, as_json)


@app.command()
def edit(
    editor: EditorFolder,
    facts: Annotated[Path, typer.Option(help="facts or records to edit, see docs/data.md")],
    out: Annotated[Path, typer.Option(help="the folder for the edit")] = Path("runs/edit"),
    model: ModelName = None,
    generate: Annotated[bool, typer.Option(help="also compare freely generated answers")] = True,
    as_json: AsJson = False,
) -> None:
    """Apply facts from a file: one change of weights for all of them, reported fact by fact and saved."""
    from malmen.checkpoint import read_state, save_edit
    from malmen.data.readers import read_records
    from malmen.evaluate import evaluate
    from malmen.files import check_replaceable
    from malmen.platform.output import err, facts_table, print_json, scores_footer, scores_table
    from malmen.platform.output import out as console

    check_replaceable(out, "edit.json")
    records = read_records(facts, "auto")
    _refuse_contradictions(records)
    folder = _folder(editor)
    lm, trained, config = _load(folder, model)
    with err.status(f"editing {len(records)} facts"):
        solved = trained.edit(lm, [record.edit for record in records])
    with err.status("measuring"):
        evaluation = evaluate(lm, records, solved.shifts, config, generate=generate, residual=solved.mean_residual())
    manifest: dict[str, Any] = {
        "base_model": lm.fingerprint(),
        "model": config.model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json"),
        "editor": {"folder": editor, "step": read_state(folder)["step"]},
        "facts": [asdict(record.edit) for record in records],
        "scores": evaluation.scores(),
    }
    save_edit(out, solved.shifts, manifest)
    if as_json:
        print_json({**evaluation.scores(), "out": str(out), "facts": [asdict(fact) for fact in evaluation.facts]})
        return
    shown = [fact for fact in evaluation.facts if fact.role == "edit"]
    console.print(facts_table(shown[:50], f"{len(shown)} facts" + (", the first 50" if len(shown) > 50 else "")))
    console.print(scores_table(evaluation.scores()))
    console.print(scores_footer(evaluation.scores()), highlight=False)
    err.print(f'The edit is in {out}. Next: malmen generate --edits {out} "a prompt"')


@app.command("eval")
def evaluate_command(
    editor: EditorFolder,
    records: Annotated[Path | None, typer.Option(help="records to edit; default: the run's validation data")] = None,
    edits: Annotated[int | None, typer.Option(min=1, help="how many at once; default: as in training")] = None,
    sets: Annotated[int, typer.Option(min=1, help="how many disjoint sets of edits to measure one by one")] = 1,
    model: ModelName = None,
    generate: Annotated[bool, typer.Option(help="also compare freely generated answers")] = True,
    as_json: AsJson = False,
) -> None:
    """Edit held-out records at once and measure ES, GS, LS and what goes with them."""
    from malmen.data.readers import read_records
    from malmen.platform.output import err, print_json, scores_footer, scores_table, spread_table
    from malmen.platform.output import out as console
    from malmen.sampling import validation_records
    from malmen.training import evaluate_sets

    lm, trained, config = _load(_folder(editor), model)
    some = read_records(records, "auto") if records else validation_records(config)
    number = edits or config.training.num_edits
    with err.status(f"editing {sets} × {number} records and measuring"):
        found = evaluate_sets(lm, trained, some, config, sets=sets, edits=number, generate=generate)
    if as_json:
        rows = [{**evaluation.scores(), "shift_ratio": evaluation.shift_ratio} for evaluation in found]
        print_json(rows[0] if sets == 1 else {"sets": rows, "mean": mean_scores(rows)})
    elif sets == 1:
        console.print(scores_table(found[0].scores()))
        console.print(scores_footer(found[0].scores()), highlight=False)
    else:
        console.print(spread_table([evaluation.scores() for evaluation in found]))


@app.command("generate")
def generate_command(
    prompts: Annotated[list[str], typer.Argument(help="what to ask")],
    edits: Annotated[Path, typer.Option(help="a folder of `malmen edit`")],
    model: ModelName = None,
    tokens: Annotated[int, typer.Option(min=1, help="the longest answer")] = 24,
    as_json: AsJson = False,
) -> None:
    """Ask the model before and after an edit, side by side."""
    from rich.table import Table
    from rich.text import Text

    from malmen.checkpoint import load_edit
    from malmen.config import DataConfig, ModelConfig
    from malmen.generate import ask
    from malmen.lm import load_lm
    from malmen.overlay import edited
    from malmen.platform.output import out as console
    from malmen.platform.output import print_json

    _, manifest = load_edit(edits)
    settings = ModelConfig(**manifest["model"])
    lm = load_lm(settings.model_copy(update={"name": model}) if model else settings)
    shifts, _ = load_edit(edits, lm)
    data = DataConfig(**manifest["data"])
    before = ask(lm, prompts, tokens, data)
    with edited(lm, shifts):
        after = ask(lm, prompts, tokens, data)
    if as_json:
        rows = zip(prompts, before, after, strict=True)
        print_json([{"prompt": prompt, "before": old, "after": new} for prompt, old, new in rows])
        return
    table = Table("prompt", "before", "after")
    for row in zip(prompts, before, after, strict=True):
        table.add_row(*map(Text, row))
    console.print(table)


@app.command()
def quickstart(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="the run's folder, replaced")] = Path("runs/quickstart"),
    as_json: AsJson = False,
) -> None:
    """Meta-train on the built-in world, edit held-out facts, show before and after."""
    from malmen.platform.quickstart import run_quickstart

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
    from malmen.platform.plan import PlanOptions
    from malmen.platform.plan_output import run_plan

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
    from malmen.platform.output import out as console

    for path in sorted(CONFIGS.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        console.print(f"{path.stem:14} {first}", highlight=False)


@app.command()
def settings(as_json: AsJson = False) -> None:
    """List every setting with its default; any can be given as key=value."""
    from rich.table import Table
    from rich.text import Text

    from malmen.config import describe_settings
    from malmen.platform.output import out as console
    from malmen.platform.output import print_json

    rows = describe_settings()
    if as_json:
        print_json(rows)
        return
    table = Table("setting", "default", "meaning")
    for row in rows:
        table.add_row(*(Text(str(row[name])) for name in ("key", "default", "description")))
    console.print(table)


@data_app.command("check")
def data_check(
    file: Annotated[Path, typer.Argument(help="the file to check")],
    format: Annotated[str, typer.Option(help="auto, malmen, zsre, counterfact or fever")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with a file of edit records, with line, field and remedy."""
    from malmen.data.check import check_file
    from malmen.platform.output import out as console
    from malmen.platform.output import print_json

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
    from malmen.platform.output import err, print_json
    from malmen.platform.output import out as console

    def on_epoch(epoch: int, loss: float, accuracy: float) -> None:
        err.print(f"epoch {epoch}/{epochs}  loss {loss:.4f}  facts known {100 * accuracy:.1f} %", highlight=False)

    manifest = build_world_model(out, seed=seed, max_epochs=epochs, on_epoch=on_epoch)
    if as_json:
        print_json(manifest)
    else:
        console.print(f"{out}: knows {100 * float(str(manifest['accuracy'])):.2f} % of {manifest['facts']} facts")
    if float(str(manifest["accuracy"])) < 0.99:
        raise EditError(f"the model in {out} knows less than 99 % of its facts; train it for more epochs")


def mean_scores(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of every number that all rows have."""
    names = [name for name in rows[0] if all(isinstance(row[name], int | float) for row in rows)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def _folder(editor: str) -> str | Path:
    """Where an editor lies; one of the model registry is fetched."""
    if not editor.startswith("models:/"):
        return editor
    from malmen.platform.registry import download_editor

    return download_editor(editor)


def _load(folder: str | Path, model: str | None) -> tuple[Any, Any, Any]:
    """The base model, the editor trained for it, and its config."""
    from malmen.checkpoint import load_editor, read_config
    from malmen.lm import load_lm
    from malmen.platform.output import err

    config = read_config(folder)
    with err.status("loading the model"):
        lm = load_lm(config.model.model_copy(update={"name": model}) if model else config.model)
    return lm, load_editor(folder, lm), config


def _refuse_contradictions(records: list[Any]) -> None:
    answers: dict[str, str] = {}
    for record in records:
        known = answers.setdefault(record.edit.prompt, record.edit.answer)
        if known != record.edit.answer:
            raise EditError(
                f"the facts contradict each other: {record.edit.prompt!r} is to be {known!r} and "
                f"{record.edit.answer!r}; `malmen data check` lists such lines"
            )


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


def main(first: Sequence[str] = ()) -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage. `first` goes before the arguments of the command line."""
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
