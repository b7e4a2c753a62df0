"""The capacity curve: a set that grows is measured as one that is edited at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import make_config

from malmen.data.splits import validation_records
from malmen.data.subjects import edits_of
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm.model import LanguageModel
from malmen.measure.capacity import capacity_curve
from malmen.training import evaluate_editor, train


@pytest.fixture(scope="module")
def editor(lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Editor:
    return train(make_config(steps=20, scalar_lr=0.1), tmp_path_factory.mktemp("run"), lm=lm).editor


def test_each_point_is_what_one_edit_of_as_many_facts_shows(lm: LanguageModel, editor: Editor) -> None:
    config = editor.config
    records = validation_records(config)[:40]
    done: list[int] = []
    curve = capacity_curve(
        lm, editor, records, config, [12, 3, 12], own_texts=8, on_progress=lambda now, _total: done.append(now)
    )
    assert [point.facts for point in curve] == [3, 12] and done == [3, 12]
    for point in curve:
        at_once = evaluate_editor(lm, editor, records, config, edits=point.facts, generate=False)
        assert point.holding == at_once.after["edit"].exact
        assert point.rephrasings_holding == at_once.after["equivalent"].exact
        assert point.max_shift_ratio == pytest.approx(max(at_once.shift_ratio.values()), rel=1e-4)
        assert point.unrelated_kept is not None and point.drift["raw"].kl > 0
    assert curve[0].drift["raw"].kl != curve[1].drift["raw"].kl


def test_a_sample_is_asked_where_there_are_many(lm: LanguageModel, editor: Editor) -> None:
    records = validation_records(editor.config)[:12]
    (few,) = capacity_curve(lm, editor, records, editor.config, [12], sample=5, own_texts=0)
    shifts = editor.edit(lm, edits_of(records)).shifts
    assert few.drift == {} and few.holding * 5 == pytest.approx(round(few.holding * 5))
    assert all(torch.isfinite(shift).all() for shift in shifts.values())


def test_more_facts_than_records_is_a_clear_error(lm: LanguageModel, editor: Editor, tmp_path: Path) -> None:
    with pytest.raises(EditError, match="50 facts are wanted, but the records have only 4 different ones"):
        capacity_curve(lm, editor, validation_records(editor.config)[:4], editor.config, [1, 50])
