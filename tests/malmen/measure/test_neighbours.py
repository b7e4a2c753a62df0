"""What lies next to an edit: whether the unedited model's text after it stays."""

from __future__ import annotations

import pytest
import torch

from malmen.config import Config
from malmen.data.records import EditRecord, Fact
from malmen.data.world import world_records
from malmen.evaluate import evaluate
from malmen.lm.generate import ask
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.measure.deployed import measure_deployed
from malmen.measure.neighbours import measure_neighbours

CONFIG = Config.model_validate({"own_text": {"max_tokens": 12}})
WORLD = world_records("validation")[:8]
PROMPTS = list(dict.fromkeys(fact.prompt for record in WORLD for fact in record.unrelated))
NEXT_TO = EditRecord(WORLD[0].edit, neighbours=tuple(PROMPTS))
KNOWN = WORLD[1].unrelated  # to the built-in model


def _shifts(lm: LanguageModel, scale: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        layer.name: scale * torch.randn(layer.value_size, layer.key_size) for layer in find_layers(lm.model, "last:2")
    }


def test_without_neighbours_nothing_is_measured(lm: LanguageModel) -> None:
    assert measure_neighbours(lm, WORLD, {}, CONFIG) == []
    assert not any(name.startswith("neighbours") for name in evaluate(lm, WORLD[:1], {}, CONFIG).scores())


def test_neighbours_that_another_record_changes_are_left_out(lm: LanguageModel) -> None:
    other = EditRecord(Fact(PROMPTS[0], "Oslo"), equivalents=(Fact(PROMPTS[1], "Oslo"),))
    (alone,), (both,) = (measure_neighbours(lm, records, {}, CONFIG) for records in ([NEXT_TO], [NEXT_TO, other]))
    counts = [found.protocols["neighbours_kl"].questions for found in (alone, both)]
    assert counts == [len(PROMPTS), len(PROMPTS) - 2]
    assert alone.scores["neighbours_kl"] == 0.0 and alone.scores["neighbours_unchanged_20"] == 1.0
    assert (alone.scores["neighbours_kl_floor"] or 0) > 0


@pytest.mark.slow
def test_unchanged_is_the_share_of_texts_that_the_edited_model_writes_again(lm: LanguageModel) -> None:
    shifts = _shifts(lm, 0.2)
    before = ask(lm, PROMPTS, 12)
    with edited(lm, shifts):
        after = ask(lm, PROMPTS, 12)
    same = sum(old == new for old, new in zip(before, after, strict=True)) / len(PROMPTS)
    (found,) = measure_neighbours(lm, [NEXT_TO], shifts, CONFIG)
    assert 0 < same < 1 and found.scores["neighbours_unchanged_20"] == pytest.approx(same)


def test_the_edited_model_reads_what_a_method_puts_in_place_of_a_prompt(lm: LanguageModel) -> None:
    (same,) = measure_neighbours(lm, [NEXT_TO], {}, CONFIG, rewrite=str)
    (other,) = measure_neighbours(lm, [NEXT_TO], {}, CONFIG, rewrite=lambda prompt: f"Well. {prompt}")
    assert same.scores["neighbours_kl"] == pytest.approx(0.0, abs=1e-6) and (other.scores["neighbours_kl"] or 0) > 1e-3


def test_what_follows_is_reported_where_a_record_has_it(lm: LanguageModel) -> None:
    """Of facts that the model knows: all are right before the edit, wherever they stand."""
    record = EditRecord(WORLD[0].edit, portability=KNOWN[:2], neighbours=(PROMPTS[0],))
    found = evaluate(lm, [record], {}, CONFIG)
    scores, protocols = found.scores(), found.protocols()
    assert scores["portability_success"] == scores["portability_success_generated_before"] == 1.0
    assert not any(name.startswith("reversal") for name in scores)
    assert [fact.role for fact in found.facts] == ["edit", "portability", "portability"]
    assert "teacher-forced" in protocols["portability_success"].decoding and "neighbours_kl" in protocols
    deployed = measure_deployed(lm, [record], {}, CONFIG).scores
    assert deployed["portability_success_deployed_exact"] == 1.0 and "reversal_success_deployed_exact" not in deployed
    reversed_fact = EditRecord(WORLD[0].edit, reversal=KNOWN[:1])
    assert evaluate(lm, [reversed_fact], {}, CONFIG, generate=False).scores()["reversal_success_exact"] == 1.0


def test_what_follows_and_is_edited_by_another_record_is_left_out(lm: LanguageModel) -> None:
    records = [EditRecord(WORLD[0].edit, portability=KNOWN[:1]), EditRecord(Fact(KNOWN[0].prompt, "Oslo"))]
    scores = evaluate(lm, records, {}, CONFIG, generate=False).scores()
    assert "portability_success" not in scores
