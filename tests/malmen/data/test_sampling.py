from __future__ import annotations

import pytest
from small_runs import make_config
from transformers import AutoTokenizer

from malmen.config import Config, load_config
from malmen.data.near_misses import NearMisses, Question
from malmen.data.records import EditRecord, Fact
from malmen.data.sampling import KINDS, OwnText, Sampler, preserved_facts, recurring_kinds
from malmen.data.splits import training_records
from malmen.data.tokens import EncodedFact, FactEncoder
from malmen.data.world import WORLD_MODEL, world_records
from malmen.errors import EditError, UsageError
from malmen.lm.model import LanguageModel, fact_encoder


def _sampler(lm: LanguageModel, config: Config) -> Sampler:
    return Sampler(config, fact_encoder(lm, config.data), training_records(config))


def test_a_step_can_be_drawn_again_by_its_number(lm: LanguageModel) -> None:
    walked = _sampler(lm, make_config())
    batches = [walked.batch(step) for step in range(4)]
    assert _sampler(lm, make_config()).batch(3) == batches[3]
    assert batches[2] != batches[3]


def test_an_epoch_uses_no_record_twice(lm: LanguageModel) -> None:
    sampler = _sampler(lm, make_config(num_edits=100))
    ids = [name for step in range(sampler.steps_per_epoch) for name in sampler.batch(step).record_ids]
    assert len(ids) == len(set(ids)) == 1100


def test_a_step_has_as_many_tuples_of_each_sort_as_the_config_says(lm: LanguageModel) -> None:
    settings = {"equivalents_per_edit": 2, "unrelated_per_edit": 2, "include_edit": True}
    batch = _sampler(lm, make_config(**settings)).batch(0)
    assert (len(batch.edits), len(batch.equivalents), len(batch.record_ids)) == (5, 15, 5)
    assert 0 < len(batch.unrelated) <= 10  # less where another record edits one
    assert all(edit in batch.equivalents for edit in batch.edits)
    alone = _sampler(lm, make_config(unrelated_per_edit=0)).batch(0)
    assert (len(alone.equivalents), len(alone.unrelated)) == (5, 0)


def test_the_number_of_edits_may_be_drawn_anew_for_each_step(lm: LanguageModel) -> None:
    sampler = _sampler(lm, make_config(min_edits=4, num_edits=64))
    numbers = [len(sampler.batch(step).edits) for step in range(60)]
    assert 4 <= min(numbers) < 8 and 32 < max(numbers) <= 64
    assert 20 < sum(number < 16 for number in numbers) < 40  # half of them below the geometric mean
    assert [len(_sampler(lm, make_config(min_edits=4, num_edits=64)).batch(step).edits) for step in (3, 7)] == [
        numbers[3],
        numbers[7],
    ]


def test_large_steps_need_not_ask_for_every_edit(lm: LanguageModel) -> None:
    everything = _sampler(lm, make_config(num_edits=40)).batch(1)
    few = _sampler(lm, make_config(num_edits=40, equivalents_per_step=8, unrelated_per_step=6)).batch(1)
    assert few.edits == everything.edits and few.record_ids == everything.record_ids
    assert (len(few.equivalents), len(few.unrelated)) == (8, 6)
    assert all(fact in everything.equivalents for fact in few.equivalents)
    places = [everything.equivalents.index(fact) for fact in few.equivalents]
    assert places == sorted(places) and places != list(range(8))
    enough = _sampler(lm, make_config(num_edits=40, equivalents_per_step=500, unrelated_per_step=500)).batch(1)
    assert enough == everything


def test_locality_may_be_asked_of_every_token_of_unrelated_texts(lm: LanguageModel) -> None:
    answers = _sampler(lm, make_config()).batch(0)
    everything = _sampler(lm, make_config(locality_tokens="all")).batch(0)
    assert (everything.edits, everything.equivalents) == (answers.edits, answers.equivalents)
    for one, whole in zip(answers.unrelated, everything.unrelated, strict=True):
        assert whole.input_ids == one.input_ids and whole.targets[one.first :] == one.targets
        assert whole.first == 0 and whole.targets[:-1] == whole.input_ids[1:]


def test_locality_at_every_token_is_refused_where_prompts_predict_nothing(lm: LanguageModel) -> None:
    config = make_config(locality_tokens="all")
    encoder = fact_encoder(lm, config.data)
    encoder.kind = "classifier"
    with pytest.raises(UsageError, match="is for decoders; this model is of kind 'classifier'"):
        Sampler(config, encoder, training_records(config))


def test_the_facts_whose_keys_are_preserved_are_different_unrelated_ones_that_the_seed_fixes() -> None:
    records = world_records("train", seed=3)[:50]
    config = Config.model_validate({"editor": {"preserved_weight": 1, "preserved_facts": 30}})
    found = preserved_facts(config, records)
    assert len(set(found)) == len(found) == 30
    assert set(found) <= {fact for record in records for fact in record.unrelated}
    assert found == preserved_facts(config, records)
    assert found != preserved_facts(config.model_copy(update={"seed": 1}), records)


def test_nothing_to_preserve_is_a_clear_error() -> None:
    config = Config.model_validate({"editor": {"preserved_weight": 3}, "data": {"train": "mine.jsonl"}})
    records = [EditRecord(Fact("Who?", "me"))]
    with pytest.raises(EditError, match=r"preserved_weight is 3, but the records of mine\.jsonl have no unrelated"):
        preserved_facts(config, records)


def test_pairs_of_phrasings_are_training_edits_with_an_equivalent_and_the_same_answer(lm: LanguageModel) -> None:
    config = Config.model_validate({"editor": {"phrasing_weight": 1, "preserved_facts": 30}})
    keys = _sampler(lm, config).preserved()
    assert not keys.unrelated and len(keys.phrasings) == 30
    texts = [tuple(lm.tokenizer.decode(fact.input_ids[: fact.first + 1]) for fact in pair) for pair in keys.phrasings]
    phrasings = {
        record.edit.prompt: [fact.prompt for fact in record.equivalents] for record in world_records("train", seed=0)
    }
    assert all(other.strip() in phrasings[prompt.strip()] for prompt, other in texts)
    for edit, equivalent in keys.phrasings:
        assert edit.targets == equivalent.targets and edit.targets
        assert len(edit.input_ids) == edit.first + len(edit.targets)  # the last one is predicted only
    assert keys.phrasings != _sampler(lm, config.model_copy(update={"seed": 1})).preserved().phrasings


def test_records_without_equivalents_have_no_phrasings_and_say_so(lm: LanguageModel) -> None:
    config = make_config(num_edits=1)
    config = config.model_copy(update={"editor": config.editor.model_copy(update={"phrasing_weight": 2.0})})
    sampler = Sampler(config, fact_encoder(lm, config.data), lambda _epoch: [EditRecord(Fact("Who?", "Ada"))])
    with pytest.raises(EditError, match=r"phrasing_weight is 2, but no record of builtin has an equivalent"):
        sampler.preserved()


def test_more_edits_than_records_is_a_clear_error(lm: LanguageModel) -> None:
    with pytest.raises(EditError, match="only 1152 records"):
        _sampler(lm, make_config(num_edits=5000))


@pytest.mark.parametrize("role", ["edit", "equivalents", "unrelated"])
def test_a_fact_that_is_too_long_is_found_before_the_first_step(lm: LanguageModel, role: str) -> None:
    long, short = Fact("Who " * 100, "Ada"), Fact("Who is it?", "Ada")
    record = EditRecord(short, (short,), (short,))
    record = EditRecord(**{**vars(record), role: long if role == "edit" else (short, long)})
    config = make_config(num_edits=1)
    sampler = Sampler(config, fact_encoder(lm, config.data), lambda _epoch: [record])
    with pytest.raises(EditError, match="more than max_length 64"):
        sampler.check_lengths()


def test_what_a_chat_template_adds_to_a_fact_counts_too() -> None:
    tokenizer = AutoTokenizer.from_pretrained(WORLD_MODEL)
    tokenizer.chat_template = "You answer every question with one word. Q: {{ messages[0].content }} A:" * 2
    record = EditRecord(Fact("Who?", "Ada"), (Fact("Who is it?", "Ada"),))
    sampler = Sampler(
        make_config(num_edits=1),
        FactEncoder(tokenizer, "decoder", prompt_format="chat", max_length=40),
        lambda _epoch: [record],
    )
    with pytest.raises(EditError, match="more than max_length 40"):
        sampler.batch(0)
    with pytest.raises(EditError, match="more than max_length 40"):
        sampler.check_lengths()


def test_own_texts_are_drawn_instead_of_given_facts_or_beside_them_but_never_of_what_is_edited(
    lm: LanguageModel,
) -> None:
    record = EditRecord(Fact("a?", "b"), (Fact("c?", "b"),), (Fact("d?", "e"), Fact("f?", "g")))
    encoder = fact_encoder(lm, Config().data)
    texts = [OwnText(prompt, encoder.encode(Fact(prompt, "h i"))) for prompt in ("a?", "c?", "d?", "j?")]
    given = {tuple(encoder.encode(fact).targets) for fact in record.unrelated}
    free = [text.fact for text in texts[2:]]

    def drawn(unrelated: str) -> list[EncodedFact]:
        training = {"num_edits": 1, "unrelated_per_edit": 2}
        config = Config.model_validate({"training": training, "data": {"unrelated": unrelated}})
        own = [] if unrelated == "given" else texts
        return list(Sampler(config, encoder, lambda _epoch: [record], own).batch(0).unrelated)

    assert {tuple(fact.targets) for fact in drawn("given")} == given and len(drawn("given")) == 2
    assert sorted(drawn("self"), key=str) == sorted(free, key=str)
    mixed = drawn("mixed")
    assert len(mixed) == 4 and {tuple(fact.targets) for fact in mixed[:2]} == given
    assert sorted(mixed[2:], key=str) == sorted(free, key=str)


def _with_near_misses(lm: LanguageModel, number: int, **settings: object) -> Sampler:
    """Every question is answered with the number of its record, so that it can be recognised."""
    config = Config.model_validate({**make_config(**settings).model_dump(), "data": {"near_misses": number}})
    records, encoder = training_records(config), fact_encoder(lm, config.data)
    answers = [encoder.encode(Fact(record.edit.prompt, str(place))) for place, record in enumerate(records(0))]
    asked = NearMisses(list(zip(map(Question.of, records(0)), answers, strict=True)))
    return Sampler(config, encoder, records, near_misses=asked)


def test_near_misses_join_the_unrelated_facts_and_change_nothing_else_of_a_step(lm: LanguageModel) -> None:
    plain, near = _sampler(lm, make_config()).batch(3), _with_near_misses(lm, 2).batch(3)
    assert (near.edits, near.equivalents, near.record_ids) == (plain.edits, plain.equivalents, plain.record_ids)
    assert near.unrelated[: len(plain.unrelated)] == plain.unrelated
    assert len(near.unrelated) == len(plain.unrelated) + 2 * 5
    assert _with_near_misses(lm, 0).batch(3) == plain
    alone = _with_near_misses(lm, 1, unrelated_per_edit=0).batch(3)
    assert len(alone.unrelated) == 5


def test_near_misses_can_be_drawn_again_by_the_steps_number_and_are_never_edited_in_it(lm: LanguageModel) -> None:
    walked, again = _with_near_misses(lm, 1, num_edits=50), _with_near_misses(lm, 1, num_edits=50)
    for step in (0, 5, 30):  # the last one is of another epoch, in which the same facts are asked in other words
        batch = walked.batch(step)
        assert batch == again.batch(step)
        records = {record.id: record for record in walked.records(step // walked.steps_per_epoch)}
        touched = {
            tuple(walked.encoder.prompt_ids(fact.prompt))
            for name in batch.record_ids
            for fact in (records[name].edit, *records[name].equivalents)
        }
        near = batch.unrelated[-50:]
        assert not touched & {tuple(fact.input_ids[: fact.first + 1]) for fact in near}
        assert len({tuple(fact.targets) for fact in near}) == 50
    assert walked.batch(0).unrelated[-50:] != walked.batch(1).unrelated[-50:]


def test_a_limit_of_unrelated_facts_is_shared_evenly_with_near_misses(lm: LanguageModel) -> None:
    batch = _with_near_misses(lm, 1, num_edits=40, unrelated_per_step=10).batch(1)
    given = _sampler(lm, make_config(num_edits=40)).batch(1).unrelated
    assert len(batch.unrelated) == 10 and sum(fact in given for fact in batch.unrelated) == 5


def test_a_trajectory_has_the_facts_of_its_step_in_batches_that_change_nothing_of_each_other(lm: LanguageModel) -> None:
    sampler = _with_near_misses(lm, 1, num_edits=200, unrelated_per_edit=4)
    whole, batches = sampler.batch(2), sampler.trajectory(2, 8)
    assert [len(batch.edits) for batch in batches] == [25] * 8
    assert sorted(name for batch in batches for name in batch.record_ids) == sorted(whole.record_ids)
    assert all(len(batch.equivalents) == 25 and len(batch.unrelated) > 25 for batch in batches)
    records = {record.id: record for record in sampler.records(0)}
    touched = {
        tuple(sampler.encoder.prompt_ids(fact.prompt))
        for name in whole.record_ids
        for fact in (records[name].edit, *records[name].equivalents)
    }
    assert not touched & {tuple(fact.input_ids[: fact.first + 1]) for batch in batches for fact in batch.unrelated}
    assert sampler.trajectory(2, 1) == [whole] and sampler.trajectory(2, 8) == batches
    assert [len(batch.edits) for batch in _sampler(lm, make_config(num_edits=3)).trajectory(0, 8)] == [1, 1, 1]
    few = _sampler(lm, make_config(num_edits=40, equivalents_per_step=16, unrelated_per_step=9)).trajectory(0, 8)
    assert [(len(batch.equivalents), len(batch.unrelated)) for batch in few] == [(2, 1)] * 8


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (["training.num_edits=10", "training.steps=10"], ()),  # each of the 100 records once
        (["training.num_edits=10", "training.steps=11"], KINDS),
        (["training.num_edits=64", "training.min_edits=2", "training.steps=5"], ()),  # 18 edits a step on average
        (["training.num_edits=64", "training.min_edits=2", "training.steps=6"], KINDS),
        (["training.num_edits=10", "training.steps=2", "batch.cache_dir=shared"], KINDS),
        (["training.num_edits=10", "training.steps=5", "data.unrelated=self", "own_text.texts=50"], ()),
        (["training.num_edits=10", "training.steps=6", "data.unrelated=self", "own_text.texts=50"], ("unrelated",)),
        (["training.num_edits=10", "training.steps=11", "data.train=builtin"], ("unrelated",)),
    ],
)
def test_only_kinds_of_facts_that_are_drawn_again_are_kept(settings: list[str], kinds: tuple[str, ...]) -> None:
    config = load_config(None, ["data.train=own.jsonl", *settings])
    assert recurring_kinds(config, 100) == kinds
