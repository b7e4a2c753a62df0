"""How many facts an editor holds at once: a curve over the size of a set that grows fact by fact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from malmen.config import Config
from malmen.data.records import EditRecord, Fact, compatible_records, unrelated_to_all
from malmen.data.subjects import edits_of
from malmen.edit_set import EditSet, FactRows, fact_rows
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.evaluate import predict_tokens, shift_ratio
from malmen.lm.generate import OnProgress
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.lm.overlay import Shifts, edited
from malmen.lm.own_text import evaluation_texts
from malmen.measure.drift import Drift, drift_of_edit

_FACTS_AT_ONCE = 64  # added to the set in one change


@dataclass(frozen=True)
class CapacityPoint:
    """An editor with so many facts in its set."""

    facts: int
    holding: float  # share of them whose whole answer is the most probable, teacher-forced
    rephrasings_holding: float | None  # the same of their equivalents
    unrelated_kept: float | None  # share of unrelated answers that are predicted as before, whole
    max_shift_ratio: float
    drift: dict[str, Drift]  # along the unedited model's own texts, by form of prompts


def capacity_curve(
    lm: LanguageModel,
    editor: Editor,
    records: Sequence[EditRecord],
    config: Config,
    sizes: Sequence[int],
    *,
    sample: int = 256,
    own_texts: int = 48,
    on_progress: OnProgress | None = None,
) -> list[CapacityPoint]:
    """The curve at these sizes. The set grows by records in their order; up to `sample` of its facts, drawn by the
    seed, are asked at each size. `on_progress` counts facts that were added."""
    sizes = sorted(set(sizes))
    chosen = compatible_records(records, sizes[-1])
    if len(chosen) < sizes[-1]:
        raise EditError(f"{sizes[-1]} facts are wanted, but the records have only {len(chosen)} different ones")
    writes = lm.kind != "classifier" and own_texts > 0
    texts = evaluation_texts(lm, config, chosen, own_texts) if writes else {}
    encoder = fact_encoder(lm, config.data)
    edits, points, held = EditSet(editor), [], 0
    facts = [encoder.encode(fact) for fact in edits_of(chosen)]
    for size in sizes:
        while held < size:
            step = min(_FACTS_AT_ONCE, size - held)
            rows: FactRows = fact_rows(lm, editor, facts[held : held + step])
            edits, held = edits.changed([rows]), held + step
            if on_progress:
                on_progress(held, sizes[-1])
        shifts = {
            name: shift.to(torch.promote_types(lm.dtype, torch.float32)) for name, shift in edits.shifts().items()
        }
        asked = random.Random(f"capacity/{config.seed}/{size}").sample(chosen[:size], min(sample, size))
        points.append(
            CapacityPoint(
                size,
                *_holding(lm, config, asked, chosen[:size], shifts),
                max(shift_ratio(lm, shifts).values()),
                {form: drift_of_edit(lm, part, shifts, config.batch.token_budget) for form, part in texts.items()},
            )
        )
    return points


def _holding(
    lm: LanguageModel, config: Config, asked: Sequence[EditRecord], held: Sequence[EditRecord], shifts: Shifts
) -> tuple[float, float | None, float | None]:
    """Shares of edits and equivalents that are right as a whole, and of unrelated answers that stay."""
    data = config.data.model_copy(update={"append_eos": False}) if lm.kind == "decoder" else config.data
    encoder, budget = fact_encoder(lm, data), config.batch.token_budget
    known = {record.edit.prompt for record in asked}
    apart = zip(held, unrelated_to_all(held), strict=True)
    groups: list[list[Fact]] = [
        [record.edit for record in asked],
        [fact for record in asked for fact in record.equivalents],
        [fact for record, facts in apart if record.edit.prompt in known for fact in facts],
    ]
    edit, equivalents, unrelated = ([encoder.encode(fact) for fact in group] for group in groups)
    before = predict_tokens(lm, unrelated, budget) if unrelated else []
    with edited(lm, shifts):
        of_edits, of_equivalents, after = (
            predict_tokens(lm, group, budget) if group else [] for group in (edit, equivalents, unrelated)
        )

    def share(found: Sequence[list[int]], wanted: Sequence[list[int]]) -> float | None:
        return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted) if wanted else None

    holding = share(of_edits, [fact.targets for fact in edit])
    assert holding is not None
    return holding, share(of_equivalents, [fact.targets for fact in equivalents]), share(after, before)
