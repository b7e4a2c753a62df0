"""Retrieval puts the nearest fact before a prompt, and nothing where none is near."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from small_runs import make_config
from tiny_models import tiny_lm
from untouched import count_hooks, digest

from malmen.config import Config, RetrievalConfig
from malmen.data.records import EditRecord, Fact
from malmen.data.tokens import EncodedFact
from malmen.data.world import make_world, relations, world_records
from malmen.errors import EditError, UsageError
from malmen.evaluate import evaluate
from malmen.lm.generate import ask
from malmen.lm.model import LanguageModel, load_lm
from malmen.methods.retrieval import Index, Retrieval, WordCounts
from malmen.training import evaluate_editor


@pytest.fixture(scope="module")
def words() -> WordCounts:
    """Those of the training people's true facts."""
    world = make_world()
    return WordCounts(fact.prompt for fact in world.facts() if fact.subject not in world.held_out)


@pytest.fixture(scope="module")
def records() -> list[EditRecord]:
    """Sixteen held-out records, each about a person of its own."""
    chosen = {record.edit.subject: record for record in world_records("validation")}
    return list(chosen.values())[:16]


def make_index(facts: Sequence[Fact], words: WordCounts, **settings: Any) -> Index:
    return Index(facts, words, RetrievalConfig(**settings))


def test_similarity_is_the_cosine_of_words_weighted_by_their_rarity(records: list[EditRecord]) -> None:
    """Here with dense vectors over one vocabulary."""
    background = [fact.prompt for record in world_records("train")[:40] for fact in record.unrelated]
    facts = [record.edit for record in records]
    asked = [fact.prompt for record in records for fact in (*record.equivalents, *record.unrelated)]
    texts = [re.split(r"[^\w]+", text.lower()) for text in [*background, *(fact.prompt for fact in facts), *asked]]
    vocabulary = sorted({word for text in texts for word in text if word})
    counts = numpy.array([[text.count(word) for word in vocabulary] for text in texts], dtype=float)
    number = len(background)
    weights = counts * (1 + numpy.log((1 + number) / (1 + (counts[:number] > 0).sum(0))))
    weights /= numpy.linalg.norm(weights, axis=1, keepdims=True)
    cosines = weights[number + len(facts) :] @ weights[number : number + len(facts)].T
    index = make_index(facts, WordCounts(background))
    for prompt, row in zip(asked, cosines, strict=True):
        nearest = index.nearest(prompt)
        if row.max() == 0:
            assert nearest is None
        else:
            assert nearest is not None and nearest[1] == pytest.approx(row.max(), abs=1e-12)
            assert row[facts.index(nearest[0])] == pytest.approx(row.max(), abs=1e-12)


@pytest.mark.parametrize("size", [1, 16])
def test_the_right_fact_stands_before_every_rephrasing_and_none_before_questions_about_others(
    records: list[EditRecord], words: WordCounts, size: int
) -> None:
    index = make_index([record.edit for record in records[:size]], words)
    for record in records[:size]:
        edit = record.edit
        for prompt in (edit.prompt, *(fact.prompt for fact in record.equivalents)):
            assert index(prompt) == f"{edit.prompt} {edit.answer}\n{prompt}"
    world, known = make_world(), {record.edit.subject for record in records}
    parts = {part for subject in known if subject for part in subject.split()}
    strangers = [name for name in sorted(world.held_out - known) if not parts & set(name.split())]
    assert len(strangers) > 20
    for subject in strangers:
        for relation in relations():
            prompt = world.fact(subject, relation, 0).prompt
            assert index(prompt) == prompt


def test_of_several_facts_about_one_person_the_one_that_is_asked_for_stands_there(words: WordCounts) -> None:
    world = make_world()
    subject = min(world.held_out)
    facts = [world.fact(subject, relation, 0) for relation in relations()]
    index = make_index(facts, words)
    for fact in facts:
        assert index(fact.prompt) == f"{fact.prompt} {fact.answer}\n{fact.prompt}"


def test_the_threshold_is_the_least_similarity_that_is_near(records: list[EditRecord], words: WordCounts) -> None:
    fact, prompt = records[0].edit, records[0].equivalents[0].prompt
    nearest = make_index([fact], words).nearest(prompt)
    assert nearest is not None and 0 < nearest[1] < 1
    at, above = nearest[1], math.nextafter(nearest[1], 1)
    assert make_index([fact], words, threshold=at)(prompt) == f"{fact.prompt} {fact.answer}\n{prompt}"
    assert make_index([fact], words, threshold=above)(prompt) == prompt
    exact = make_index([record.edit for record in records], words, threshold=1)
    for record in records:
        assert exact(record.edit.prompt) != record.edit.prompt
        assert all(exact(other.prompt) == other.prompt for other in record.equivalents)
    assert make_index([fact], words, threshold=0)("Хто вона?") == "Хто вона?"  # shares no word


def test_a_later_answer_to_the_same_prompt_replaces_the_earlier_and_braces_are_no_fields(words: WordCounts) -> None:
    index = make_index(
        [Fact("Who is {Ada}?", "1"), Fact("Who is {Ada}?", "{2}")], words, template="{answer}<{fact}{prompt}"
    )
    assert index("Is {Ada} here?") == "{2}<Who is {Ada}?Is {Ada} here?"


def test_an_empty_index_is_the_unedited_model(lm: LanguageModel, records: list[EditRecord], words: WordCounts) -> None:
    config, index = make_config(), make_index([], words)
    without = evaluate(lm, records[:3], {}, config, own_texts=4)
    evaluation = evaluate(lm, records[:3], {}, config, own_texts=4, rewrite=index)
    assert evaluation == without and evaluation.drift["raw"].kl == 0


def test_the_method_edits_no_weight_and_the_model_reads_the_facts(records: list[EditRecord]) -> None:
    lm, config = load_lm("builtin"), make_config()
    before, method = (digest(lm), count_hooks(lm)), Retrieval(load_lm("builtin"), config)
    assert method.prepare(lm) == method.prepare(lm) > 0
    edit = method.edit(lm, [record.edit for record in records[:2]])
    assert edit.shifts == {} and edit.mean_residual() is None and edit.rewrite is not None
    evaluation = evaluate(lm, records[:2], {}, config, own_texts=4, rewrite=edit.rewrite)
    again = evaluate_editor(lm, method, records[:2], config, edits=2, generate=False)
    assert [fact.forced_after for fact in again.facts] == [fact.forced_after for fact in evaluation.facts]
    assert (digest(lm), count_hooks(lm)) == before
    tokens, right = lm.tokenizer, []
    for fact in evaluation.facts:
        text = edit.rewrite(fact.prompt)
        assert (text == fact.prompt) or text.endswith(f"\n{fact.prompt}")
        ids, first = tokens(f"{text} {fact.answer}")["input_ids"], len(tokens(text)["input_ids"])
        best = lm.model(torch.tensor([ids])).logits[0, first - 1 : -1].argmax(-1).tolist()
        assert fact.forced_after == tokens.decode(best).split(tokens.eos_token)[0].strip()
        assert fact.right_after == (best == ids[first:])
        assert fact.after is not None and ask(lm, text, 16).startswith(fact.after)
        right += [best == ids[first:]] if fact.role == "edit" else []
    scores = evaluation.scores()
    assert scores["edit_success_exact"] == sum(right) / 2 and scores["max_shift_ratio"] == 0
    assert scores["own_raw_kl"] > 0 and any(fact.after != fact.before for fact in evaluation.facts)


def test_the_fact_stands_inside_the_chat_template(records: list[EditRecord], words: WordCounts) -> None:
    lm, seen = load_lm("builtin"), list[list[EncodedFact]]()
    lm.tokenizer.chat_template = "{% for m in messages %}USER: {{ m.content }}\nANSWER:{% endfor %}"
    config = Config.model_validate({"data": {"prompt_format": "chat"}})

    def predict(facts: Sequence[EncodedFact]) -> list[list[int]]:
        seen.append(list(facts))
        return [fact.targets for fact in facts]

    record = EditRecord(records[0].edit)
    index = make_index([record.edit], words)
    evaluate(lm, [record], {}, config, generate=False, rewrite=index, predict=predict)
    ((before,), (after,)) = seen
    ids, fact = lm.tokenizer, record.edit
    for encoded, content in ((before, fact.prompt), (after, f"{fact.prompt} {fact.answer}\n{fact.prompt}")):
        read = encoded.input_ids[: encoded.first + 1]
        assert ids.decode(read) == f"USER: {content}\nANSWER:" and encoded.targets == before.targets


@pytest.mark.parametrize("template", ["{fact} {answer}", "{prompt} {fact} {answer}", "{fact}{answer}{x}{prompt}", "{"])
def test_a_template_without_the_three_fields_is_an_error(lm: LanguageModel, template: str) -> None:
    config = Config.model_validate({"baselines": {"retrieval": {"template": template}}})
    with pytest.raises(UsageError, match=r"expected \{fact\} and \{answer\}, and \{prompt\} at its end"):
        Retrieval(lm, config)


def test_no_facts_and_models_that_write_nothing_are_errors(lm: LanguageModel) -> None:
    with pytest.raises(EditError, match="no facts"):
        Retrieval(lm, Config()).edit(lm, [])
    with torch.random.fork_rng(), pytest.raises(EditError, match="this one is a classifier"):
        Retrieval(tiny_lm("bert"), Config())
