"""Meta-training in one process: the oracle for every distributed way of running it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from malmen.baselines.method import EditMethod
from malmen.checkpoint import load_editor, save_checkpoint
from malmen.config import Config
from malmen.data.records import EditRecord
from malmen.data.subjects import edits_of
from malmen.editor import Editor, seeded_editor
from malmen.errors import EditError
from malmen.evaluate import Evaluation, evaluate
from malmen.facts import fact_encoder
from malmen.layers import find_layers
from malmen.lm import LanguageModel, load_lm
from malmen.meta import StepReport, meta_step
from malmen.run_folder import RunFolder
from malmen.sampling import (
    Sampler,
    check_facts,
    check_held_out,
    compatible_records,
    data_fingerprint,
    training_records,
    validation_records,
)


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
    """Train an editor into `folder`; an unfinished run of the same config there is gone on with, to the same θ."""
    start = time.perf_counter()
    check_held_out(config)
    opened = RunFolder.open(folder, config, resume=resume)
    opened.check_data(data_fingerprint(config))
    lm = lm or load_lm(config.model)
    fingerprint = lm.fingerprint()
    editor = (
        make_editor(lm, config) if opened.checkpoint is None else load_editor(opened.checkpoint, lm, optimizer=True)
    )
    editor.config = config
    sampler = Sampler(config, fact_encoder(lm, config.data), training_records(config))
    records = validation_records(config)
    sampler.check_lengths()
    check_facts(sampler.encoder, check_enough(records, config.training.eval_edits or config.training.num_edits))
    run = TrainingRun(folder, lm, editor, opened.history)
    opened.begin()
    scores: dict[str, Any] = {}
    caches = sampler.caches(fingerprint, lm.dtype)
    while editor.steps_done < config.training.steps:
        report = meta_step(lm, editor, sampler.batch(editor.steps_done), caches)
        step = editor.steps_done
        row: dict[str, Any] = {"step": step, **vars(report)}
        if on_step:
            on_step(step, report)
        every, scores = config.training.eval_every, {}
        if every and step % every == 0 and step < config.training.steps:
            scores = evaluate_editor(lm, editor, records, config, generate=False).scores()
            row.update(scores=scores, damping=editor.damping(), edit_lr=editor.edit_lr())
            if on_evaluation:
                on_evaluation(step, scores)
        opened.add(row)
        due = bool(scores) or step % config.training.checkpoint_every == 0  # what was measured may be the best
        if due and step < config.training.steps:
            save_checkpoint(folder, editor, fingerprint, scores, keep=config.training.keep_checkpoints)
    save_checkpoint(folder, editor, fingerprint, scores, keep=config.training.keep_checkpoints)
    opened.begin({"finished": True})
    run.seconds = time.perf_counter() - start
    return run


def make_editor(lm: LanguageModel, config: Config) -> Editor:
    """A fresh editor, drawn from the config's seed."""
    return seeded_editor(find_layers(lm.model, config.editor.layers, config.editor.ffn), config).to(lm.device)


def evaluate_editor(
    lm: LanguageModel,
    editor: EditMethod,
    records: list[EditRecord],
    config: Config,
    *,
    edits: int | None = None,
    generate: bool = True,
) -> Evaluation:
    """Edit the first held-out records at once and measure."""
    some = check_enough(records, edits or config.training.eval_edits or config.training.num_edits)
    solved = editor.edit(lm, edits_of(some))
    return evaluate(lm, some, solved.shifts, config, generate=generate, residual=solved.mean_residual())


def evaluate_sets(
    lm: LanguageModel,
    editor: EditMethod,
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


def check_enough(records: list[EditRecord], number: int) -> list[EditRecord]:
    """The first so many different ones; EditError if there are fewer."""
    some = compatible_records(records, number)
    if len(some) < number:
        raise EditError(
            f"{number} held-out edits were asked for, but there are only {len(some)} different records to edit"
        )
    return some
