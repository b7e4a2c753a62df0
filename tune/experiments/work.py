"""The work of one variant and seed: train its editor if it needs one, then measure cell by cell."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from malmen.config import Config
from malmen.data.records import EditRecord, Fact
from malmen.data.splits import validation_records
from malmen.data.subjects import edits_of
from malmen.edit_method import EditMethod, UntrainedMethod, rewrite_of
from malmen.edit_set import EditSet, fact_rows
from malmen.editor import Editor, finite
from malmen.errors import EditError
from malmen.evaluate import Evaluation, evaluate
from malmen.lm.model import LanguageModel, encode_batches, fact_encoder, load_lm
from malmen.lm.overlay import edited
from malmen.lm.trace import trace
from malmen.methods.mend import sum_residual
from malmen.methods.registry import METHODS
from malmen.metrics import score
from malmen.platform.cluster import on_own_device
from malmen.runs.checkpoint import load_editor
from malmen.runs.checkpoint_lookup import read_state
from malmen.runs.files import atomic_file
from malmen.training import check_enough, train
from malmen.tune.experiments.cells import Cell, Cells, Group, check_base_model
from malmen.tune.experiments.settings import ExperimentConfig

_FAILURES = {"edit": "the edit", "equivalent": "the rephrasing", "unrelated": "an unrelated answer"}  # by kind of fact


def do_cells(group: Group, settings: ExperimentConfig, folder: Path) -> None:
    """Measure the cells that are not measured yet; a failure is stored as an error, and the others continue."""
    store = Cells(folder)
    waiting = [cell for cell in group.cells if not store.done(cell)]
    if not waiting:
        return
    config = group.variant.seeded(group.seed)
    lm = load_lm(on_own_device(config.model))
    check_base_model(lm, folder)
    try:
        method, seconds = _ready_method(group, config, lm, folder)
    except EditError as error:  # e.g. an equation that has no solution without regularisation
        for cell in waiting:
            store.put(cell, {"error": str(error)})
        return
    records = validation_records(config)
    config = config.model_copy(update={"data": group.variant.data or config.data})
    for cell in waiting:
        try:
            measured = _measure(cell, lm, method, records, config, settings)
            store.put(cell, {**measured, "training_seconds": seconds})
        except EditError as error:
            store.put(cell, {"error": str(error)})


def _ready_method(group: Group, config: Config, lm: LanguageModel, folder: Path) -> tuple[EditMethod, float | None]:
    """The method, trained if it needs to be, and the seconds that this took, if they are known."""
    entry = METHODS.get(group.variant.name)
    if entry is not None and entry.make is not None:
        untrained = entry.make(lm, config)
        return untrained, untrained.prepare(lm)
    run_folder = folder / "editors" / group.variant.run_name(group.seed)
    file = run_folder.with_name(f"{run_folder.name}.json")
    done = 0
    with suppress(EditError):  # no checkpoint yet
        done = read_state(run_folder)["step"]
    if done >= config.training.steps:  # by a variant with the same editor, or before this one was killed
        known = json.loads(file.read_text(encoding="utf-8"))["training_seconds"] if file.exists() else None
        return load_editor(run_folder, lm), known
    run = train(config, run_folder, lm=lm)
    seconds = sum(sum(row["seconds"].values()) for row in run.history if "seconds" in row)
    atomic_file(file, json.dumps({"training_seconds": seconds}) + "\n")
    return run.editor, seconds


def _measure(
    cell: Cell, lm: LanguageModel, method: EditMethod, records: list[EditRecord], config: Config,
    settings: ExperimentConfig,
) -> dict[str, Any]:  # fmt: skip
    """Edit held-out facts and evaluate the edit; what the cell's file holds."""
    records = check_enough(records, cell.edits)
    facts = edits_of(records)
    began = time.perf_counter()
    if cell.rounds == 1:
        edit = method.edit(lm, facts)
        shifts, residual, rewrite = edit.shifts, edit.mean_residual(), rewrite_of(edit)
    else:
        shifts, residual, rewrite = _in_rounds(cell, lm, method, facts), None, None
    seconds = time.perf_counter() - began
    if residual is None and cell.rounds == 1 and isinstance(method, Editor):
        batches = encode_batches(lm, facts, method.config)
        residual = sum_residual(method, trace(lm, method.layers, batches, config.editor.tokens))
    evaluation = evaluate(
        lm, records, shifts, config,
        generate=settings.generate, own_texts=settings.own_texts if settings.generate else 0, residual=residual,
        rewrite=rewrite,
    )  # fmt: skip
    scores, failures = evaluation.scores(), _failures(evaluation, settings.failures)
    return {"scores": scores, "score": score(scores), "edit_seconds": seconds, "failures": failures}


def _in_rounds(cell: Cell, lm: LanguageModel, method: EditMethod, facts: Sequence[Fact]) -> dict[str, Tensor]:
    """The shifts after editing part by part: `union` keeps one set of facts, `again` edits the edited model."""
    parts = [facts[first :: cell.rounds] for first in range(cell.rounds)]
    if cell.way == "union":
        assert isinstance(method, Editor)
        encoder, edits = fact_encoder(lm, method.config.data), EditSet(method)
        for part in parts:
            edits = edits.changed([fact_rows(lm, method, [encoder.encode(fact) for fact in part])])
        return edits.shifts()
    editor = method.for_rounds() if isinstance(method, UntrainedMethod) else method
    shifts: dict[str, Tensor] = {}
    for part in parts:
        with edited(lm, shifts):
            new = editor.edit(lm, part).shifts
        shifts = {name: shifts[name] + shift if name in shifts else shift for name, shift in new.items()}
    return finite(shifts)


def _failures(evaluation: Evaluation, number: int) -> list[dict[str, Any]]:
    """The first answers of each kind that were not given, or lost: generated texts, else the most probable tokens."""
    rows = []
    for kind, what in _FAILURES.items():
        wrong = [fact for fact in evaluation.facts if fact.role == kind and not fact.right_after]
        for fact in [fact for fact in wrong if kind != "unrelated" or fact.right_before][:number]:
            about: dict[str, Any] = {"what": what, "prompt": fact.prompt, "answer": fact.answer}
            if fact.before is not None and fact.after is not None:
                rows.append({**about, "before": fact.before, "after": fact.after})
            else:
                rows.append({**about, "before": fact.forced_before, "after": fact.forced_after, "forced": True})
    return rows
