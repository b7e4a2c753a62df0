"""`malmen quickstart`: the whole story on the built-in world in a few minutes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from malmen.config import load_config
from malmen.data.splits import validation_records
from malmen.data.world import NUM_HELD_OUT, NUM_SUBJECTS, RELATIONS
from malmen.evaluate import Evaluation, FactReport
from malmen.lm.model import load_lm
from malmen.platform.cli.output import (
    err,
    facts_table,
    out,
    print_json,
    scores_footer,
    scores_table,
    training_progress,
)
from malmen.platform.train import Listener, train
from malmen.runs.checkpoint import load_editor
from malmen.runs.files import atomic_file, check_replaceable
from malmen.training import evaluate_editor

_MARK = ".quickstart"  # says that a folder is ours to replace


def run_quickstart(config_path: Path, overrides: list[str], folder: Path, *, as_json: bool) -> None:
    """Train, edit, show, save."""
    start = time.perf_counter()
    config = load_config(config_path, overrides)
    _clear(folder)
    err.print(
        f"The built-in world has {NUM_SUBJECTS} people with {len(RELATIONS)} facts each. A hyper-network learns to "
        f"edit on the facts of {NUM_SUBJECTS - NUM_HELD_OUT} of them; the other {NUM_HELD_OUT} are kept to test it.",
        highlight=False,
    )
    with training_progress(config.training.steps) as progress:
        listener = Listener(progress.step, progress.evaluation, progress.event)
        trained = train(config, folder, listener=listener)
    with err.status("editing held-out facts and measuring"):
        lm = load_lm(config.model)
        evaluation = evaluate_editor(lm, load_editor(folder, lm), validation_records(config), config)
    plot_training(trained.history, folder / "training.png")
    result = _result(evaluation, trained.steps, time.perf_counter() - start, config.model_dump(mode="json"))
    atomic_file(folder / "result.json", json.dumps(result, indent=1) + "\n")
    _write_example_facts(folder / "facts.jsonl", evaluation)
    if as_json:
        print_json(result)
        return
    _show(evaluation, folder, result["seconds"])


def _clear(folder: Path) -> None:
    """Only what an earlier quickstart left is removed."""
    check_replaceable(folder, _MARK)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARK).touch()


def _result(evaluation: Evaluation, steps: int, seconds: float, config: dict[str, Any]) -> dict[str, Any]:
    return {**evaluation.scores(), "steps": steps, "seconds": round(seconds, 1), "config": config}


def _write_example_facts(path: Path, evaluation: Evaluation) -> None:
    """Some of the edits as a file that `malmen edit` takes."""
    rows = [{"prompt": fact.prompt, "answer": fact.answer} for fact in evaluation.facts if fact.role == "edit"][:8]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _show(evaluation: Evaluation, folder: Path, seconds: float) -> None:
    out.print(facts_table(_examples(evaluation.facts), "A few answers of the model"))
    out.print(scores_table(evaluation.scores()))
    out.print(scores_footer(evaluation.scores()), highlight=False)
    out.print(
        f"\nDone in {seconds:.0f} s. The editor, training.png and result.json are in {folder}.\n"
        "What to try next:\n"
        f"  malmen edit --editor {folder} --facts {folder}/facts.jsonl --out runs/edit\n"
        f'  malmen generate --edits runs/edit "{evaluation.facts[0].prompt}"\n'
        f"  malmen eval --editor {folder} --edits 512\n"
        "  make quickstart ARGS=aggregation=sum     # MEND's way of merging, for comparison",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _examples(facts: list[FactReport]) -> list[FactReport]:
    roles = ("edit", "equivalent", "unrelated")
    return [fact for role in roles for fact in [one for one in facts if one.role == role][:3]]


def plot_training(history: list[dict[str, Any]], path: Path) -> None:
    """Losses by step, and the held-out scores where there are any, as a PNG."""
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
    names = (("edit_success", "ES"), ("generalization_success", "GS"), ("locality_success", "LS"))
    for name, label in names:
        scores.plot([row["step"] for row in scored], [row["scores"][name] for row in scored], marker="o", label=label)
    scores.set(xlabel="step", ylabel="share of answer tokens", ylim=(0, 1.02), title="held-out edits")
    scores.legend(loc="lower right")
    figure.savefig(path, dpi=120)
