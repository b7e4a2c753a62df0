"""The edits behind other text: what is read, who wrote it, and that the shares are those of plain forwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_folders import write_model
from plain import plain_log_probs

from malmen.config import Config
from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.evaluate import evaluate
from malmen.lm.generate import ask
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, load_lm
from malmen.lm.own_text import openings
from malmen.measure.answer_text import contains
from malmen.measure.context import _encoded, _encoder, edits_in_context, own_words, questions_in_context

CONFIG = Config.model_validate({"own_text": {"max_tokens": 8}, "editor": {"layers": "last:2"}})
RECORDS = world_records("validation")[:6]
EDITS = [record.edit for record in RECORDS]


@pytest.fixture
def chatting() -> LanguageModel:
    """The built-in model with a chat template of its own."""
    lm = load_lm("builtin")
    lm.tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content }}\n{% endfor %}A:"
    )
    return lm


def _shifts(lm: LanguageModel, scale: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        layer.name: scale * torch.randn(layer.value_size, layer.key_size) for layer in find_layers(lm.model, "last:2")
    }


def _texts(lm: LanguageModel, facts: list[EncodedFact]) -> list[str]:
    return [lm.tokenizer.decode([*fact.input_ids, fact.targets[-1]]) for fact in facts]


def test_a_question_stands_behind_its_old_answer_and_behind_an_opening(lm: LanguageModel) -> None:
    encoder = _encoder(lm, CONFIG, "raw")
    asked = questions_in_context(lm, encoder, EDITS, CONFIG)
    texts = {context: _texts(lm, _encoded(encoder, questions, None)) for context, questions in asked.items()}
    for place, fact in enumerate(EDITS):
        question = f"{fact.prompt} {fact.answer}"
        (old,) = ask(lm, [fact.prompt], 8)
        assert texts["none"][place] == question
        assert texts["old_answer"][place] == f"{fact.prompt} {old}. {question}"
        before, found, rest = texts["neutral"][place].partition(f" {question}")
        assert found and not rest and before.endswith((".", "!", "?"))
        assert before.startswith(tuple(openings())) and not contains(before, fact.answer)


def test_in_a_chat_the_context_is_an_earlier_turn(chatting: LanguageModel) -> None:
    encoder = _encoder(chatting, CONFIG, "chat")
    asked = questions_in_context(chatting, encoder, EDITS, CONFIG)
    (question,), (fact, behind) = asked["none"][:1], asked["old_answer"][0]
    assert behind is not None and behind[0] == fact.prompt == question.fact.prompt
    (text,) = _texts(chatting, _encoded(encoder, asked["old_answer"][:1], None))
    assert text == f"Q: {fact.prompt}\nA: {behind[1]}\nQ: {fact.prompt}\nA:{fact.answer}"


def test_contexts_are_drawn_by_the_seed(lm: LanguageModel) -> None:
    encoder = _encoder(lm, CONFIG, "raw")
    drawn = [
        questions_in_context(lm, encoder, EDITS, CONFIG.model_copy(update={"seed": seed}))["neutral"]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_question_whose_old_answer_is_the_new_one_is_left_out_of_every_context(lm: LanguageModel) -> None:
    known = RECORDS[0].unrelated[0]  # the model knows it
    asked = questions_in_context(lm, _encoder(lm, CONFIG, "raw"), [EDITS[0], known, EDITS[1]], CONFIG)
    assert {
        context: [question.fact for question in questions] for context, questions in asked.items()
    } == dict.fromkeys(("none", "neutral", "old_answer"), EDITS[:2])
    measured = edits_in_context(lm, [known], {}, CONFIG)
    assert set(measured.scores.values()) == {None}
    assert {protocol.questions for protocol in measured.protocols.values()} == {0}


def test_a_model_that_would_say_nothing_is_made_to_speak(lm: LanguageModel) -> None:
    known = RECORDS[0].unrelated[0]
    done = f"{known.prompt} {known.answer}"  # after which it ends
    assert ask(lm, done) == ""
    (text,) = own_words(lm, _encoder(lm, CONFIG, "raw"), [done], CONFIG)
    assert any(letter.isalnum() for letter in text)


@pytest.mark.slow
def test_shares_are_those_of_one_question_at_a_time(lm: LanguageModel) -> None:
    """Against each question by itself through a model whose weights were really changed."""
    shifts = _shifts(lm, 0.1)
    measured, encoder = edits_in_context(lm, EDITS, shifts, CONFIG), _encoder(lm, CONFIG, "raw")
    for context, questions in questions_in_context(lm, encoder, EDITS, CONFIG).items():
        for suffix, when in (("_before", {}), ("", shifts)):
            hits = []
            for fact in _encoded(encoder, questions, None):
                with torch.no_grad():
                    best = plain_log_probs(lm, fact, when).argmax(-1).tolist()
                hits.append([a == b for a, b in zip(best, fact.targets, strict=True)])
            name = f"edit_success_in_context_raw_{context}"
            assert measured.scores[name + suffix] == pytest.approx(sum(map(sum, hits)) / sum(map(len, hits)))
            whole = sum(map(all, hits)) / len(hits)
            assert measured.scores[f"{name}_exact{suffix}"] == measured.scores[f"{name}_generated{suffix}"] == whole
            assert measured.protocols[name].questions == len(questions) == len(EDITS)


@pytest.mark.slow
def test_without_a_context_the_shares_are_es(lm: LanguageModel) -> None:
    shifts = _shifts(lm, 0.1)
    scores = edits_in_context(lm, EDITS, shifts, CONFIG).scores
    alone = evaluate(lm, RECORDS, shifts, CONFIG).scores()
    for way in ("", "_exact", "_generated"):
        for when in ("", "_before"):
            assert scores[f"edit_success_in_context_raw_none{way}{when}"] == alone[f"edit_success{way}{when}"]


@pytest.mark.slow
def test_a_model_with_a_template_is_asked_in_both_forms(chatting: LanguageModel) -> None:
    done: list[tuple[int, int]] = []
    measured = edits_in_context(
        chatting, EDITS[:2], {}, CONFIG, generate=False, on_progress=lambda now, total: done.append((now, total))
    )
    assert {name.split("_")[4] for name in measured.scores} == {"raw", "chat"}
    assert not any("generated" in name for name in measured.scores)
    assert done[-1][0] == done[-1][1] and done == sorted(done)
    reads = {protocol.prompt for protocol in measured.protocols.values()}
    assert len(reads) == 6 and all(("template" in text) != ("raw" in text) for text in reads)


def test_what_the_edited_model_reads_instead_has_the_whole_context(lm: LanguageModel) -> None:
    encoder, seen = _encoder(lm, CONFIG, "raw"), []

    def rewrite(prompt: str) -> str:
        seen.append(prompt)
        return f"Well. {prompt}"

    asked = questions_in_context(lm, encoder, EDITS[:1], CONFIG)
    (text,) = _texts(lm, _encoded(encoder, asked["old_answer"], rewrite))
    assert text == f"Well. {seen[0]} {EDITS[0].answer}" and seen[0].count(EDITS[0].prompt) == 2


def test_a_context_without_room_is_cut_at_its_start(lm: LanguageModel) -> None:
    long = Fact(EDITS[0].prompt.replace("?", "") + " a" * 20 + "?", EDITS[0].answer)
    encoder = _encoder(lm, CONFIG, "raw")
    asked = questions_in_context(lm, encoder, [long], CONFIG)
    (whole,), (cut,) = (_encoded(encoder, asked[context], None) for context in ("none", "old_answer"))
    assert len(cut.input_ids) == encoder.max_length and cut.targets == whole.targets
    assert cut.input_ids[-len(whole.input_ids) + 1 :] == whole.input_ids[1:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_encoder_decoders_are_asked_and_classifiers_refused(tmp_path: Path, kind: str) -> None:
    lm = load_lm(str(write_model(kind, tmp_path / kind)))
    if kind == "bert":
        with pytest.raises(EditError, match="a classifier writes no text"):
            edits_in_context(lm, EDITS[:2], {}, CONFIG)
    else:
        scores = edits_in_context(lm, EDITS[:2], {}, CONFIG).scores
        assert scores["edit_success_in_context_raw_none"] == scores["edit_success_in_context_raw_none_before"]
