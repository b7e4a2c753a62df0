from __future__ import annotations

import json

import pytest
import torch
from plain import plain_log_probs
from small_runs import make_config

from malmen.config import DataConfig
from malmen.data.records import EditRecord, Fact, unrelated_to_all
from malmen.data.world import world_records
from malmen.evaluate import _ends, evaluate, predict_tokens, shift_ratio
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.training import evaluate_editor, make_editor


def _shifts(lm: LanguageModel, scale: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        layer.name: scale * torch.randn(layer.value_size, layer.key_size) for layer in find_layers(lm.model, "last:2")
    }


@pytest.mark.slow
def test_an_evaluation_reports_every_score_before_and_after(lm: LanguageModel) -> None:
    config = make_config()
    evaluation = evaluate_editor(lm, make_editor(lm, config), world_records("validation"), config, edits=7)
    scores = evaluation.scores()
    assert scores["edits"] == 7
    assert scores["locality_success_before"] == scores["locality_success_generated_before"] == 1.0
    assert scores["edit_success_exact_before"] == 0.0
    assert None not in scores.values()
    assert json.loads(json.dumps(scores)) == scores
    unrelated = [fact for some in unrelated_to_all(world_records("validation")[:7]) for fact in some]
    assert len(evaluation.facts) == 7 + 21 + len(unrelated)


def test_a_prompt_that_leaves_room_for_its_own_answer_is_measured_beside_longer_answers(lm: LanguageModel) -> None:
    encoder = fact_encoder(lm, make_config().data)
    prompt = "In which city was Ada born?"
    while len(encoder.prompt_ids(prompt + " a")) < encoder.max_length:
        prompt += " a"
    full, other = Fact(prompt, "a"), Fact("Who is it?", "a b c d e f g h")
    found = evaluate(lm, [EditRecord(full), EditRecord(other)], {}, make_config())
    assert found.after["edit"].generated is not None
    assert len(encoder.encode(full).input_ids) >= encoder.max_length - 1


def test_drift_is_the_same_with_generated_answers_and_without(lm: LanguageModel) -> None:
    records, shifts = world_records("validation")[:3], _shifts(lm, 0.15)
    alone, beside = (
        evaluate(lm, records, shifts, make_config(), generate=wanted, own_texts=4) for wanted in (False, True)
    )
    assert alone.drift == beside.drift != {}
    assert alone.floor == beside.floor != {}
    assert evaluate(lm, records, shifts, make_config(), generate=False).drift == {}


@pytest.mark.slow
def test_a_generated_answer_counts_as_ended_only_where_the_text_ends_after_it(lm: LanguageModel) -> None:
    """The built-in model says an instrument and stops, so the first word of two is right and goes on."""
    known = next(
        fact for record in world_records("validation") for fact in record.unrelated if len(fact.answer.split()) == 2
    )
    part = Fact(known.prompt, known.answer.split()[0])
    for fact, ended in ((known, 1.0), (part, 0.0)):
        found = evaluate(lm, [EditRecord(fact)], {}, make_config())
        assert (found.after["edit"].exact, found.after["edit"].generated) == (1.0, 1.0)
        assert found.after["edit"].ended == ended


@pytest.mark.parametrize(
    ("rest", "ended"),
    [("", False), (" is", False), ("son", False), (".", True), (", who", True), ("\n", True), (" ; so", True)],
)
def test_what_follows_an_answer_tells_whether_it_has_ended(lm: LanguageModel, rest: str, ended: bool) -> None:
    fact = fact_encoder(lm, DataConfig(append_eos=False)).encode(Fact("Who is it?", "Ada"))
    following = lm.tokenizer(rest)["input_ids"] if rest else []
    assert _ends(lm, [*fact.targets, *following], fact) is ended
    assert _ends(lm, [*fact.targets, lm.tokenizer.eos_token_id], fact)


@pytest.mark.slow
def test_generated_agreement_is_the_share_of_unrelated_texts_that_stay(lm: LanguageModel) -> None:
    records = world_records("validation")[:6]
    found = evaluate(lm, records, _shifts(lm, 0.15), make_config())
    texts = [(fact.before, fact.after) for fact in found.facts if fact.role == "unrelated"]
    same = sum(before == after for before, after in texts) / len(texts)
    assert 0.0 < same < 1.0 and found.scores()["locality_agreement_generated"] == pytest.approx(same)


@pytest.mark.slow
def test_an_edit_that_changes_nothing_scores_after_as_before(lm: LanguageModel) -> None:
    evaluation = evaluate(lm, world_records("validation")[:3], _shifts(lm, 0.0), make_config())
    assert evaluation.after == evaluation.before
    assert evaluation.locality_agreement == evaluation.generated_agreement == 1.0
    assert set(evaluation.shift_ratio.values()) == {0.0}
    assert all((fact.before, fact.right_before) == (fact.after, fact.right_after) for fact in evaluation.facts)


@pytest.mark.slow
def test_success_is_the_share_of_answer_tokens_and_of_whole_answers_that_are_the_most_probable(
    lm: LanguageModel,
) -> None:
    """Against each fact by itself through a model whose weights were really changed."""
    records, shifts = world_records("validation")[:6], _shifts(lm, 0.15)
    encoder = fact_encoder(lm, DataConfig(append_eos=False))  # a decoder's end mark is counted by `ended` only
    evaluation = evaluate(lm, records, shifts, make_config(), generate=False)
    roles = {
        "edit": [record.edit for record in records],
        "equivalent": [fact for record in records for fact in record.equivalents],
        "unrelated": [fact for some in unrelated_to_all(records) for fact in some],
    }
    for when, table in (({}, evaluation.before), (shifts, evaluation.after)):
        for role, facts in roles.items():
            hits = []
            for fact in map(encoder.encode, facts):
                with torch.no_grad():
                    best = plain_log_probs(lm, fact, when).argmax(-1).tolist()
                hits.append([token == target for token, target in zip(best, fact.targets, strict=True)])
            tokens = [hit for row in hits for hit in row]
            assert table[role].tokens == pytest.approx(sum(tokens) / len(tokens))
            assert table[role].exact == pytest.approx(sum(map(all, hits)) / len(hits))
            assert table[role].generated is None
    assert 0.0 < (evaluation.after["unrelated"].tokens or 0.0) < 1.0  # the edit really broke something


@pytest.mark.parametrize("budget", [1, 50, 10_000])
def test_predictions_come_in_the_order_of_facts_however_they_are_batched(lm: LanguageModel, budget: int) -> None:
    encoder = fact_encoder(lm, make_config().data)
    facts = [encoder.encode(record.unrelated[0]) for record in world_records("validation")[:20]]
    assert predict_tokens(lm, facts, budget) == [fact.targets for fact in facts]  # the model knows them


def test_what_was_not_given_is_not_measured(lm: LanguageModel) -> None:
    evaluation = evaluate(lm, [EditRecord(Fact("Who is it?", "Ada"))], _shifts(lm, 0.0), make_config())
    scores = evaluation.scores()
    for name in ("generalization_success", "locality_success", "locality_agreement", "mean_residual"):
        assert scores[name] is None
    assert scores["edit_success"] is not None
    assert [fact.role for fact in evaluation.facts] == ["edit"]


def test_the_size_of_a_shift_is_relative_to_its_weight(lm: LanguageModel) -> None:
    (layer,) = find_layers(lm.model, "last:1")
    weight = lm.model.get_parameter(f"{layer.name}.weight").detach()
    assert shift_ratio(lm, {layer.name: 0.25 * weight.T.double()})[layer.name] == pytest.approx(0.25)
