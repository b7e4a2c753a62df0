"""Meta-training in one process: the oracle for every distributed way of running it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from malmen.checkpoint import latest_checkpoint, load_editor, save_checkpoint
from malmen.config import Config
from malmen.data.records import EditRecord
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.evaluate import Evaluation, evaluate
from malmen.facts import fact_encoder
from malmen.files import whole_file
from malmen.layers import find_layers
from malmen.lm import LanguageModel, load_lm
from malmen.meta import StepReport, meta_step
from malmen.sampling import Sampler, compatible_records, training_records, validation_records

# What may change between a run and its resumption without changing θ.
_FREE = {
    "training.eval_every",
    "training.eval_edits",
    "training.checkpoint_every",
    "batch.token_budget",
    "batch.hypernet_rows",
}


@dataclass
class TrainingRun:
    """A finished run."""

    folder: Path
    lm: LanguageModel
    editor: Editor
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def train(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    lm: LanguageModel | None = None,
    on_step: Callable[[int, StepReport], None] | None = None,
    on_evaluation: Callable[[int, dict[str, Any]], None] | None = None,
) -> TrainingRun:
    """Train an editor into `folder`; with `resume`, go on from its newest checkpoint to the same θ."""
    start = time.perf_counter()
    _check_folder(folder, resume)
    lm = lm or load_lm(config.model)
    fingerprint = lm.fingerprint()
    editor = _resumed(folder, lm, config) if resume and _has_checkpoint(folder) else make_editor(lm, config)
    sampler = Sampler(config, fact_encoder(lm, config.data), training_records(config))
    records = validation_records(config)
    _check_enough(records, config.training.eval_edits or config.training.num_edits)
    sampler.check_lengths()
    run = TrainingRun(folder, lm, editor, _kept_history(folder, editor.steps_done))
    folder.mkdir(parents=True, exist_ok=True)
    scores: dict[str, Any] = {}
    while editor.steps_done < config.training.steps:
        report = meta_step(lm, editor, sampler.batch(editor.steps_done))
        step = editor.steps_done
        row: dict[str, Any] = {"step": step, **vars(report)}
        if on_step:
            on_step(step, report)
        every = config.training.eval_every
        if every and step % every == 0 and step < config.training.steps:
            scores = evaluate_editor(lm, editor, records, config, generate=False).scores()
            row.update(scores=scores, damping=editor.damping(), edit_lr=editor.edit_lr())
            if on_evaluation:
                on_evaluation(step, scores)
        run.history.append(row)
        _append(folder / "history.jsonl", row, first=len(run.history) == 1)
        if step % config.training.checkpoint_every == 0 and step < config.training.steps:
            save_checkpoint(folder, editor, fingerprint, scores)
    save_checkpoint(folder, editor, fingerprint, scores)
    run.seconds = time.perf_counter() - start
    return run


def make_editor(lm: LanguageModel, config: Config) -> Editor:
    """A fresh editor, drawn from the config's seed."""
    layers = find_layers(lm.model, config.editor.layers, config.editor.ffn)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Editor(layers, config).to(lm.device)


def evaluate_editor(
    lm: LanguageModel,
    editor: Editor,
    records: list[EditRecord],
    config: Config,
    *,
    edits: int | None = None,
    generate: bool = True,
) -> Evaluation:
    """Edit the first held-out records at once and measure."""
    some = _check_enough(records, edits or config.training.eval_edits or config.training.num_edits)
    solved = editor.edit(lm, [record.edit for record in some])
    return evaluate(lm, some, solved.shifts, config, generate=generate, solved=solved)


def evaluate_sets(
    lm: LanguageModel,
    editor: Editor,
    records: list[EditRecord],
    config: Config,
    *,
    sets: int,
    edits: int,
    generate: bool = True,
) -> list[Evaluation]:
    """Several disjoint sets of edits, each laid over the unedited model."""
    chosen = compatible_records(records, sets * edits)
    parts = [chosen[first * edits : (first + 1) * edits] for first in range(sets)]
    return [evaluate_editor(lm, editor, part, config, edits=edits, generate=generate) for part in parts]


def _check_enough(records: list[EditRecord], number: int) -> list[EditRecord]:
    some = compatible_records(records, number)
    if len(some) < number:
        raise EditError(
            f"{number} held-out edits were asked for, but there are only {len(some)} different records to edit"
        )
    return some


def _check_folder(folder: Path, resume: bool) -> None:
    if not resume and (folder / "history.jsonl").exists():
        raise EditError(f"{folder} already holds a run; go on with --resume, or choose another --out")


def _has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("checkpoint-*/state.json"))


def _resumed(folder: Path, lm: LanguageModel, config: Config) -> Editor:
    editor = load_editor(folder, lm, optimizer=True)
    before, now = _flat(editor.config.model_dump()), _flat(config.model_dump())
    free = _FREE | ({"training.steps"} if config.training.schedule == "constant" else set())
    changed = [
        f"{key} ({before.get(key)!r} → {value!r})"
        for key, value in now.items()
        if before.get(key) != value and key not in free
    ]
    if changed:
        raise EditError(
            f"cannot resume {latest_checkpoint(folder)} with another config: {', '.join(changed)}; "
            "use the config it was started with, or start a new run"
        )
    editor.config = config
    return editor


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _kept_history(folder: Path, steps_done: int) -> list[dict[str, Any]]:
    """The history up to the checkpoint; later lines belong to steps that will be run again."""
    path = folder / "history.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last line of a killed run may be cut off
            break
    rows = [row for row in rows if row["step"] <= steps_done]
    whole_file(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _append(path: Path, row: dict[str, Any], first: bool) -> None:
    with path.open("w" if first else "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
