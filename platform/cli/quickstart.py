"""`malmen quickstart`: training, editing and measuring on the built-in world in a few minutes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmen.metrics import METRICS
from malmen.platform.cli.options import AsJson, Overrides, resolve_config
from malmen.platform.cli.output import err, facts_table, out, print_json, show_scores
from malmen.platform.cli.progress import counted, slow_import, status, training_progress

if TYPE_CHECKING:
    from malmen.config import Config
    from malmen.evaluate import Evaluation

QUICKSTART_FILE = ".quickstart"  # marks a folder that a quickstart wrote and may replace


def quickstart(
    overrides: Overrides = None,
    folder: Annotated[
        Path, typer.Option("--out", help="the run's folder; an earlier quickstart there is replaced")
    ] = Path("runs/quickstart"),
    as_json: AsJson = False,
) -> None:
    """Meta-train on the built-in world, edit held-out facts, show before and after."""
    slow_import("malmen.platform.train")
    from malmen.config import load_config
    from malmen.runs.files import exclusive_folder

    with exclusive_folder(folder):
        _run(load_config(resolve_config("builtin"), overrides or []), folder, as_json)


def _run(config: Config, folder: Path, as_json: bool) -> None:
    from malmen.data.splits import validation_records
    from malmen.data.world import NUM_HELD_OUT, NUM_SUBJECTS, relations
    from malmen.lm.model import load_lm
    from malmen.platform.train import Listener, train
    from malmen.runs.checkpoint import load_editor
    from malmen.runs.files import atomic_file, write_json
    from malmen.training import evaluate_editor

    start = time.perf_counter()
    _clear(folder)
    err.print(
        f"The built-in world has {NUM_SUBJECTS} people with {len(relations())} facts each. A hyper-network learns to "
        f"edit on the facts of {NUM_SUBJECTS - NUM_HELD_OUT} of them; the other {NUM_HELD_OUT} are kept to test it.",
    )
    with training_progress(config.training.steps) as progress:
        progress.phase("starting Ray")
        trained = train(config, folder, listener=Listener(progress.step, progress.evaluation, progress.event))
    with counted("editing held-out facts and measuring") as on_progress:
        lm = load_lm(config.model)
        evaluation = evaluate_editor(
            lm, load_editor(folder, lm), validation_records(config), config, on_progress=on_progress
        )
    with status("drawing training.png", announced=False):
        plot_training(trained.history, folder / "training.png")
    result = {
        **evaluation.scores(),
        "steps": trained.steps,
        "seconds": round(time.perf_counter() - start, 1),
        "config": config.model_dump(mode="json"),
    }
    write_json(folder / "result.json", result)
    examples = [{"prompt": fact.prompt, "answer": fact.answer} for fact in evaluation.facts if fact.role == "edit"][:8]
    atomic_file(folder / "facts.jsonl", "".join(json.dumps(row) + "\n" for row in examples))  # for `malmen edit`
    if as_json:
        print_json(result)
    else:
        _show_quickstart(evaluation, folder, result["seconds"])


def _clear(folder: Path) -> None:
    """An empty folder; only what an earlier quickstart left is removed."""
    from malmen.runs.files import check_replaceable

    check_replaceable(folder, QUICKSTART_FILE)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / QUICKSTART_FILE).touch()


def _show_quickstart(evaluation: Evaluation, folder: Path, seconds: float) -> None:
    examples = [fact for metric in METRICS for fact in [f for f in evaluation.facts if f.role == metric.kind][:3]]
    out.print(facts_table(examples, "A few answers of the model"))
    show_scores(evaluation.scores(), evaluation.protocols())
    out.print(
        f"\nDone in {seconds:.0f} s. The editor, training.png and result.json are in {folder}.\n"
        "What to try next:\n"
        f"  malmen edit --editor {folder} --facts {folder}/facts.jsonl --out runs/edit\n"
        f'  malmen generate --edits runs/edit "{evaluation.facts[0].prompt}"\n'
        f"  malmen eval --editor {folder} --edits 512\n"
        "  make quickstart ARGS=aggregation=sum     # MEND's way of merging, for comparison",
        markup=False,
        soft_wrap=True,
    )


def plot_training(history: list[dict[str, Any]], path: Path) -> None:
    """Losses by step, and the held-out scores of the steps that have some, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scored = [row for row in history if row.get("scores")]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, scores = figure.subplots(1, 2)
    trained = [row for row in history if "meta_loss" in row]
    steps = [row["step"] for row in trained]
    for name, label in (("generalization_loss", "L_gen"), ("locality_loss", "L_loc")):
        losses.plot(steps, [max(row[name], 1e-6) for row in trained], label=label)
    losses.set(xlabel="step", ylabel="loss", yscale="log", title="meta loss")
    losses.legend()
    scored_steps = [row["step"] for row in scored]
    for metric in METRICS:
        scores.plot(scored_steps, [row["scores"][metric.name] for row in scored], marker="o", label=metric.label)
    scores.set(xlabel="step", ylabel="share of answer tokens", ylim=(0, 1.02), title="held-out edits")
    scores.legend(loc="lower right")
    figure.savefig(path, dpi=120)
