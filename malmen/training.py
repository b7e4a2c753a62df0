"""Meta-training in one process: the oracle for every distributed way of running it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malmen.config import Config, TrainingConfig
from malmen.data.near_misses import NearMisses
from malmen.data.records import EditRecord, compatible_records
from malmen.data.sampling import OwnText, Sampler
from malmen.data.splits import (
    check_encodable,
    check_held_out,
    data_fingerprint,
    shared_facts,
    training_records,
    validation_records,
)
from malmen.data.subjects import edits_of
from malmen.edit_method import EditMethod, rewrite_of
from malmen.editor import Editor, seeded_editor
from malmen.errors import EditError
from malmen.evaluate import OWN_TEXTS, Evaluation, evaluate
from malmen.lm.generate import OnProgress, part_of
from malmen.lm.layers import edited_layers
from malmen.lm.model import LanguageModel, fact_encoder, load_lm
from malmen.lm.own_text import ALONE, Writers, near_misses, own_texts
from malmen.lm_side import Caches, LMSide
from malmen.measure.context import edits_in_context
from malmen.measure.deployed import measure_deployed
from malmen.meta import StepReport, meta_step, no_progress
from malmen.methods.rledit import trajectory_step
from malmen.runs.checkpoint import add_scores, load_editor, save_checkpoint
from malmen.runs.checkpoint_lookup import read_state
from malmen.runs.run_folder import RunFolder

log = logging.getLogger(__name__)


@dataclass
class TrainingRun:
    """A finished run."""

    folder: Path
    lm: LanguageModel
    editor: Editor
    history: list[dict[str, Any]]
    seconds: float


def train(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    lm: LanguageModel | None = None,
    on_phase: Callable[[str], None] = lambda _description: None,
    on_step: Callable[[int, StepReport], None] | None = None,
    on_evaluation: Callable[[int, dict[str, Any]], None] | None = None,
) -> TrainingRun:
    """Train an editor into `folder`. An unfinished run of the same config there is resumed, to the same θ."""
    start = time.perf_counter()
    check_held_out(config)
    opened = RunFolder.open(folder, config, resume=resume)
    opened.check_data(data_fingerprint(config))
    if lm is None:
        on_phase("loading the model")
        lm = load_lm(config.model)
    if warning := lm.slow_place():
        log.warning(warning)
    fingerprint = lm.fingerprint()
    on_phase("reading the records")
    sampler, records = _read_data(lm, config, on_phase)
    begin = opened.checkpoint
    editor = load_editor(begin, lm, optimizer=True) if begin else make_editor(lm, config, sampler, on_phase)
    editor.config = config
    opened.begin()
    opened.cut(editor.steps_done)
    caches, training = sampler.caches(fingerprint, lm.dtype), config.training

    def measure() -> None:
        on_phase("measuring on held-out records")
        step, scores = editor.steps_done, evaluate_editor(lm, editor, records, config, generate=False).scores()
        if on_evaluation:
            on_evaluation(step, scores)
        if not opened.has_scores(step):  # before the checkpoint has them: what that has is not measured again
            opened.add({"step": step, "scores": scores, "damping": editor.damping(), "edit_lr": editor.edit_lr()})
        opened.flush()
        add_scores(folder, step, scores, keep=training.keep_checkpoints)

    not_measured = begin is not None and not read_state(begin)["scores"]
    if not_measured and _is_measured(training, editor.steps_done):  # the run was interrupted just there
        measure()
    while editor.steps_done < training.steps:
        report = _next_step(lm, editor, sampler, caches)
        step = editor.steps_done
        if on_step:
            on_step(step, report)
        opened.add({"step": step, **vars(report), "edit_lr": editor.edit_lr()})
        if warning := no_progress(opened.history, config):
            log.warning(warning)
        if _is_measured(training, step) or step == training.steps or step % training.checkpoint_every == 0:
            opened.flush()
            extra = {"locality_coef": editor.locality_coef}
            save_checkpoint(folder, editor, fingerprint, keep=training.keep_checkpoints, extra=extra)
        if _is_measured(training, step):
            measure()
    opened.begin({"finished": True})
    return TrainingRun(folder, lm, editor, opened.history, time.perf_counter() - start)


def _next_step(lm: LanguageModel, editor: Editor, sampler: Sampler, caches: Caches) -> StepReport:
    """A step with all of its edits at once, or in a trajectory."""
    step, length = editor.steps_done, editor.config.training.trajectory
    if length > 1:
        return trajectory_step(lm, editor, sampler.trajectory(step, length))
    return meta_step(lm, editor, sampler.batch(step), caches)


def make_sampler(
    lm: LanguageModel,
    config: Config,
    on_phase: Callable[[str], None] = lambda _description: None,
    writers: Writers = ALONE,
) -> Sampler:
    """What draws the facts of each step; it has the model's own texts and answers if the config wants them."""
    records = training_records(config)

    def progress(doing: str) -> OnProgress:
        on_phase(doing)
        return lambda done, total: on_phase(f"{doing}: batch {done} of {total}")

    texts: Sequence[OwnText] = ()
    if config.data.unrelated != "given":
        texts = own_texts(lm, config, records(0), writers, progress("the unedited model writes what is to stay"))
    asked = NearMisses()
    if config.data.near_misses:
        asked = near_misses(lm, config, records(0), writers, progress("the unedited model answers near misses"))
    return Sampler(config, fact_encoder(lm, config.data), records, texts, asked)


def _read_data(lm: LanguageModel, config: Config, on_phase: Callable[[str], None]) -> tuple[Sampler, list[EditRecord]]:
    """The sampler of training records and the held-out records; both can be encoded before the first step."""
    sampler = make_sampler(lm, config, on_phase)
    records = validation_records(config)
    sampler.check_lengths()
    held_out = check_enough(records, config.training.eval_edits or config.training.num_edits)
    check_encodable(sampler.encoder, held_out)
    if shared := shared_facts(config, sampler.records(0), held_out):
        log.warning(shared)
    return sampler, records


def _is_measured(training: TrainingConfig, step: int) -> bool:
    """Whether held-out records are evaluated after this step; after the last one the caller does it."""
    return bool(training.eval_every and step % training.eval_every == 0 and 0 < step < training.steps)


def make_editor(
    lm: LanguageModel,
    config: Config,
    sampler: Sampler | None = None,
    on_phase: Callable[[str], None] = lambda _description: None,
) -> Editor:
    """A fresh editor, drawn from the config's seed, with the keys that it is to preserve, if any."""
    editor = seeded_editor(edited_layers(lm.model, config.editor), config).to(lm.device)
    if config.editor.preserving:
        on_phase("reading the texts whose keys are preserved")
        keys = (sampler or make_sampler(lm, config)).preserved()
        for moments in LMSide(lm, editor.layers, config).preserved_moments(keys):
            editor.preserve(moments)
    return editor


def evaluate_editor(
    lm: LanguageModel,
    editor: EditMethod,
    records: list[EditRecord],
    config: Config,
    *,
    edits: int | None = None,
    generate: bool = True,
    own_texts: int | None = None,
    in_context: bool = False,
    deployed: bool = False,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Edit the first held-out records all at once, and evaluate the edit; on demand also behind other text, and by the
    answers that a user of the deployed model gets. `own_texts`, by default 48 with `generate` and none without."""
    chosen = check_enough(records, edits or config.training.eval_edits or config.training.num_edits)
    solved, parts = editor.edit(lm, edits_of(chosen)), 1 + in_context + deployed
    rewrite = rewrite_of(solved)
    along = own_texts if own_texts is not None else OWN_TEXTS if generate else 0
    evaluation = evaluate(
        lm, chosen, solved.shifts, config,
        generate=generate, own_texts=along, residual=solved.mean_residual(), rewrite=rewrite,
        on_progress=part_of(on_progress, 0, parts),
    )  # fmt: skip
    if in_context:
        facts, progress = [record.edit for record in chosen], part_of(on_progress, 1, parts)
        evaluation.measured.append(
            edits_in_context(lm, facts, solved.shifts, config, rewrite=rewrite, generate=generate, on_progress=progress)
        )
    if deployed:
        progress = part_of(on_progress, parts - 1, parts)
        evaluation.measured.append(
            measure_deployed(lm, chosen, solved.shifts, config, rewrite=rewrite, on_progress=progress)
        )
    return evaluation


def evaluate_sets(
    lm: LanguageModel,
    editor: EditMethod,
    records: list[EditRecord],
    config: Config,
    *,
    sets: int,
    edits: int,
    generate: bool = True,
    own_texts: int | None = None,
    in_context: bool = False,
    deployed: bool = False,
    on_progress: OnProgress | None = None,
) -> list[Evaluation]:
    """Evaluations of several disjoint sets of edits, each of the unedited model."""
    chosen = compatible_records(records, sets * edits)
    evaluations = []
    for number in range(sets):
        part, progress = chosen[number * edits : (number + 1) * edits], part_of(on_progress, number, sets)
        evaluation = evaluate_editor(
            lm, editor, part, config,
            edits=edits, generate=generate, own_texts=own_texts, in_context=in_context, deployed=deployed,
            on_progress=progress,
        )  # fmt: skip
        evaluations.append(evaluation)
    return evaluations


def check_enough(records: list[EditRecord], number: int) -> list[EditRecord]:
    """The first `number` records that edit different prompts; EditError if there are fewer."""
    chosen = compatible_records(records, number)
    if len(chosen) < number:
        raise EditError(f"{number} held-out edits are needed, but only {len(chosen)} different records exist")
    return chosen
