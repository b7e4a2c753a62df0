"""Answers as a user gets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_folders import write_model

from malmen.config import Config
from malmen.data.records import EditRecord, Fact
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.evaluate import evaluate
from malmen.lm.generate import ask
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, fact_encoder, load_lm
from malmen.lm.overlay import edited
from malmen.measure.answer_text import contains, first_sentence, says_exactly
from malmen.measure.deployed import answer_tokens, deployed_answers, deployed_form, measure_deployed

RECORDS = world_records("validation")[:4]
KNOWN = [fact for record in RECORDS for fact in record.unrelated]  # to the built-in model


def _shifts(lm: LanguageModel, scale: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        layer.name: scale * torch.randn(layer.value_size, layer.key_size) for layer in find_layers(lm.model, "last:2")
    }


def test_what_the_model_knows_is_right_in_any_spelling(lm: LanguageModel) -> None:
    spelt = [Fact(fact.prompt, f"The {fact.answer.upper()}!") for fact in KNOWN]
    scores = measure_deployed(lm, [EditRecord(fact) for fact in spelt], {}, Config()).scores
    assert scores["edit_success_deployed_exact"] == scores["edit_success_deployed_contained"] == 1.0
    assert scores["generalization_success_deployed_exact"] is None


def test_part_of_an_answer_is_contained_and_not_exact(lm: LanguageModel) -> None:
    fact = next(fact for fact in KNOWN if len(fact.answer.split()) > 1)
    part = EditRecord(Fact(fact.prompt, fact.answer.split()[-1]))
    scores = measure_deployed(lm, [part], {}, Config()).scores
    assert scores["edit_success_deployed_exact"] == 0.0
    assert scores["edit_success_deployed_contained"] == scores["edit_success_deployed_contained_before"] == 1.0


@pytest.mark.slow
def test_shares_are_those_of_answers_asked_by_hand(lm: LanguageModel) -> None:
    shifts = _shifts(lm, 0.2)
    scores = measure_deployed(lm, RECORDS, shifts, Config()).scores
    for suffix, when in (("_before", {}), ("", shifts)):
        with edited(lm, when):
            said = [first_sentence(text) for text in ask(lm, [fact.prompt for fact in KNOWN], 32)]
        for way, is_right in (("exact", says_exactly), ("contained", contains)):
            share = sum(is_right(text, fact.answer) for text, fact in zip(said, KNOWN, strict=True)) / len(KNOWN)
            assert scores[f"locality_success_deployed_{way}{suffix}"] == pytest.approx(share)
    assert scores["locality_success_deployed_exact_before"] == 1.0
    assert 0 < scores["locality_success_deployed_exact"] == scores["locality_agreement_deployed"] < 1


def test_the_chat_template_is_used_where_there_is_one_and_the_protocol_says_so(lm: LanguageModel) -> None:
    chatting = load_lm("builtin")
    chatting.tokenizer.chat_template = "{{ messages[0].content }}"  # so both forms read the same
    assert (deployed_form(lm), deployed_form(chatting)) == ("raw", "chat")
    raw, chat = (measure_deployed(model, RECORDS[:1], {}, Config()) for model in (lm, chatting))
    assert raw.scores == chat.scores
    protocols = [one.protocols["edit_success_deployed_exact"] for one in (raw, chat)]
    assert "raw" in protocols[0].prompt and "chat template" in protocols[1].prompt
    assert protocols[0].decoding == protocols[1].decoding and "end mark" in protocols[0].decoding
    assert raw.protocols["edit_success_deployed_contained"].scorer != protocols[0].scorer
    chatting.tokenizer.chat_template = "Well. {{ messages[0].content }}"
    read = fact_encoder(chatting, Config().data.model_copy(update={"prompt_format": "chat"}))
    assert read.prompt_text(KNOWN[0].prompt)[0].startswith("Well.")
    facts = KNOWN[:3]
    assert deployed_answers(chatting, facts, Config(), 32) == [
        first_sentence(text) for text in ask(lm, [f"Well. {fact.prompt}" for fact in facts], 32)
    ]


def test_the_edited_model_reads_what_a_method_puts_in_place_of_a_prompt(lm: LanguageModel) -> None:
    other = KNOWN[1]
    record = EditRecord(Fact(KNOWN[0].prompt, other.answer))
    scores = measure_deployed(lm, [record], {}, Config(), rewrite=lambda _prompt: other.prompt).scores
    assert scores["edit_success_deployed_exact_before"] == float(says_exactly(KNOWN[0].answer, other.answer))
    assert scores["edit_success_deployed_exact"] == 1.0


def test_a_long_prompt_is_asked_with_the_room_that_it_leaves(lm: LanguageModel) -> None:
    encoder = fact_encoder(lm, Config().data)
    prompt = "In which city was Ada born?"
    while len(encoder.prompt_ids(prompt)) < encoder.max_length - 2:
        prompt += " a"
    long = Fact(prompt, "a")
    assert answer_tokens(lm, [long], Config()) == 32
    (text,) = deployed_answers(lm, [long], Config(), 32)
    assert len(lm.tokenizer(text)["input_ids"]) <= 3


@pytest.mark.slow
def test_without_an_edit_deployed_exact_is_what_a_sure_model_generates(lm: LanguageModel) -> None:
    """On answers of the built-in world, which end with the end mark and are spelt in one way."""
    found = evaluate(lm, RECORDS, {}, Config(), own_texts=0).scores()
    scores = measure_deployed(lm, RECORDS, {}, Config()).scores
    for name in ("edit_success", "generalization_success", "locality_success"):
        assert scores[f"{name}_deployed_exact"] == found[f"{name}_generated_before"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_encoder_decoders_are_asked_and_classifiers_refused(tmp_path: Path, kind: str) -> None:
    lm = load_lm(str(write_model(kind, tmp_path / kind)))
    if kind == "bert":
        with pytest.raises(EditError, match="a classifier writes no text"):
            measure_deployed(lm, RECORDS[:1], {}, Config())
    else:
        assert measure_deployed(lm, RECORDS[:1], {}, Config()).scores["locality_agreement_deployed"] == 1.0
