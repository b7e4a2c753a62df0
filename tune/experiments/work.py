"""The work of one variant and seed: train its editor if it has one, then cell by cell."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from malmen.config import Config
from malmen.data.records import EditRecord, Fact
from malmen.data.splits import validation_records
from malmen.data.subjects import edits_of
from malmen.edit_method import EditMethod, UntrainedMethod, finite
from malmen.edit_set import EditSet, fact_rows
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.evaluate import Evaluation, FactReport, evaluate
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
from malmen.tune.experiments.cells import Cell, Cells
from malmen.tune.experiments.settings import ExperimentConfig
from malmen.tune.experiments.variants import Variant

ROLES = {"edit": "the edit", "equivalent": "the rephrasing", "unrelated": "an unrelated answer"}


def do_cells(variant: Variant, seed: int, cells: Sequence[Cell], settings: ExperimentConfig, folder: Path) -> None:
    """Do what is not done yet; what fails is kept as an error, so that the others go on."""
    store = Cells(folder)
    waiting = [cell for cell in cells if not store.done(cell)]
    if not waiting:
        return
    config = variant.seeded(seed)
    lm = load_lm(on_own_device(config.model))
    check_base_model(lm, folder)
    try:
        method, trained = ready_method(variant, seed, lm, folder)
    except EditError as error:  # e.g. an equation that has no solution without regularisation
        for cell in waiting:
            store.put(cell, {"error": str(error)})
        return
    records = validation_records(config)
    config = config.model_copy(update={"data": variant.data or config.data})
    for cell in waiting:
        try:
            store.put(cell, {**measure(cell, lm, method, records, config, settings), **trained})
        except EditError as error:
            store.put(cell, {"error": str(error)})


def check_base_model(lm: LanguageModel, folder: Path) -> None:
    """Numbers of two models are not mixed, even where both have stood under the same name."""
    marks, found = folder / "base_model", lm.fingerprint()  # an empty file: several tasks may leave it at once
    marks.mkdir(parents=True, exist_ok=True)
    if others := sorted(mark.name for mark in marks.iterdir() if mark.name != found):
        raise EditError(
            f"{folder} holds measurements of base model {others[0]}; the model of that name is now {found}: choose "
            "another --out"
        )
    (marks / found).touch()


def ready_method(variant: Variant, seed: int, lm: LanguageModel, folder: Path) -> tuple[EditMethod, dict[str, Any]]:
    """The method, trained where it needs to be, and what that took."""
    config = variant.seeded(seed)
    entry = METHODS.get(variant.name)
    if entry is not None and entry.make is not None:
        method = entry.make(lm, config)
        return method, {"training_seconds": method.prepare(lm)}
    place = folder / "editors" / variant.run_name(seed)
    taken = place.with_name(f"{place.name}.json")
    if _is_trained(place, config):  # another variant comes to the same, or it was killed after the training
        known = json.loads(taken.read_text(encoding="utf-8")) if taken.exists() else {"training_seconds": None}
        return load_editor(place, lm), known
    run = train(config, place, lm=lm)
    found = {"training_seconds": sum(sum(row["seconds"].values()) for row in run.history if "seconds" in row)}
    atomic_file(taken, json.dumps(found) + "\n")
    return run.editor, found


def _is_trained(place: Path, config: Config) -> bool:
    try:
        return bool(read_state(place)["step"] >= config.training.steps)
    except EditError:
        return False


def measure(
    cell: Cell, lm: LanguageModel, method: EditMethod, records: list[EditRecord], config: Config,
    settings: ExperimentConfig,
) -> dict[str, Any]:  # fmt: skip
    """Edit held-out facts and look."""
    some = check_enough(records, cell.edits)
    facts = edits_of(some)
    began = time.perf_counter()
    if cell.rounds == 1:
        found = method.edit(lm, facts)
        shifts, residual = found.shifts, found.mean_residual()
    else:
        shifts, residual = _in_rounds(cell, lm, method, facts), None
    seconds = time.perf_counter() - began
    if residual is None and cell.rounds == 1 and isinstance(method, Editor):
        batches = encode_batches(lm, facts, method.config)
        residual = sum_residual(method, trace(lm, method.layers, batches, config.editor.tokens))
    evaluation = evaluate(lm, some, shifts, config, generate=settings.generate, residual=residual)
    scores = evaluation.scores()
    return {
        "scores": scores,
        "score": score(scores),
        "edit_seconds": seconds,
        "failures": failures_of(evaluation, settings.failures),
    }


def _in_rounds(cell: Cell, lm: LanguageModel, method: EditMethod, facts: Sequence[Fact]) -> dict[str, Tensor]:
    """The facts in so many rounds: `union` keeps one set, `again` edits the edited model."""
    parts = [facts[first :: cell.rounds] for first in range(cell.rounds)]
    if cell.way == "union":
        assert isinstance(method, Editor)
        encoder, held = fact_encoder(lm, method.config.data), EditSet(method)
        for part in parts:
            held = held.changed([fact_rows(lm, method, [encoder.encode(fact) for fact in part])])
        return held.shifts()
    editor = method.for_rounds() if isinstance(method, UntrainedMethod) else method
    shifts: dict[str, Tensor] = {}
    for part in parts:
        with edited(lm, shifts):
            new = editor.edit(lm, part).shifts
        shifts = {name: shifts[name] + shift if name in shifts else shift for name, shift in new.items()}
    return finite(shifts)


def failures_of(evaluation: Evaluation, number: int) -> list[dict[str, Any]]:
    """The first rows of each kind that went wrong: the answer was not given, or one that was right was lost."""
    rows = []
    for role, what in ROLES.items():
        wrong = [fact for fact in evaluation.facts if fact.role == role and not fact.right_after]
        if role == "unrelated":
            wrong = [fact for fact in wrong if fact.right_before]
        for fact in wrong[:number]:
            rows.append({"what": what, "prompt": fact.prompt, "answer": fact.answer, **_said(fact)})
    return rows


def _said(fact: FactReport) -> dict[str, Any]:
    """Before and after: as generated, else the most probable token at each place of the answer."""
    if fact.before is not None and fact.after is not None:
        return {"before": fact.before, "after": fact.after}
    return {"before": fact.forced_before, "after": fact.forced_after, "forced": True}
