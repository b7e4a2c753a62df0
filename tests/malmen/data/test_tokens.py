from __future__ import annotations

import logging
import random

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, FactEncoder, make_batches
from malmen.data.world import WORLD_MODEL
from malmen.errors import EditError

FACT = Fact("Which instrument does Ada play?", "grand piano")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(WORLD_MODEL)


@pytest.fixture
def framed(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that opens every text with <s> and closes it with </s>."""
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    )
    return tokenizer


def test_a_decoder_reads_prompt_and_answer_as_one_text(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = FactEncoder(tokenizer, "decoder").encode(FACT)
    whole = [*encoded.input_ids, encoded.targets[-1]]
    assert tokenizer.decode(whole) == "Which instrument does Ada play? grand piano"
    assert tokenizer.decode(encoded.targets) == " grand piano"
    assert encoded.first + len(encoded.targets) == len(encoded.input_ids)
    assert whole[encoded.first + 1 :] == encoded.targets


def test_no_second_space_after_a_prompt_that_ends_in_one(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = FactEncoder(tokenizer, "decoder").encode(Fact("Answer:\n", "harp"))
    assert tokenizer.decode([*encoded.input_ids, encoded.targets[-1]]) == "Answer:\nharp"


def test_bos_is_set_once_and_a_closing_eos_is_not_part_of_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    encoded = FactEncoder(tokenizer, "decoder").encode(FACT)
    whole = [*encoded.input_ids, encoded.targets[-1]]
    assert whole.count(tokenizer.eos_token_id) == 1
    assert whole[0] == tokenizer.eos_token_id
    assert tokenizer.decode(encoded.targets) == " grand piano"


def test_eos_is_appended_where_wanted(tokenizer: PreTrainedTokenizerFast) -> None:
    for kind, append_eos, expected in (
        ("decoder", None, False),
        ("decoder", True, True),
        ("encoder-decoder", None, True),
        ("encoder-decoder", False, False),
    ):
        encoder = FactEncoder(tokenizer, kind, append_eos=append_eos)  # type: ignore[arg-type]
        assert (encoder.encode(FACT).targets[-1] == tokenizer.eos_token_id) is expected


def test_an_encoder_decoder_starts_its_answer_from_the_start_token(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = FactEncoder(tokenizer, "encoder-decoder", decoder_start=7).encode(FACT)
    assert encoded.input_ids == [7, *encoded.targets[:-1]]
    assert encoded.encoder_ids == tokenizer(FACT.prompt)["input_ids"]


def test_a_classifier_answers_at_the_first_token(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = FactEncoder(tokenizer, "classifier")
    assert encoder.encode(Fact("Rome is in Italy.", "SUPPORTS")).targets == [1]
    assert encoder.encode(Fact("Rome is in Italy.", "REFUTES")).targets == [0]
    with pytest.raises(EditError, match="one of REFUTES, SUPPORTS; given 'yes'"):
        encoder.encode(Fact("Rome is in Italy.", "yes"))


def test_the_chat_template_writes_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(EditError, match="no chat template"):
        FactEncoder(tokenizer, "decoder", prompt_format="chat").encode(FACT)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]:"
    encoded = FactEncoder(tokenizer, "decoder", prompt_format="chat").encode(FACT)
    text = tokenizer.decode([*encoded.input_ids, encoded.targets[-1]])
    assert text == "[user] Which instrument does Ada play? [assistant]:grand piano"
    assert tokenizer.decode(encoded.targets) == "grand piano"


def test_earlier_turns_stand_before_the_prompt_in_a_chat(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]:"
    encoder = FactEncoder(tokenizer, "decoder", prompt_format="chat")
    text, special = encoder.prompt_text("Who?", [("Hello", "Good day")])
    assert (text, special) == ("[user] Hello [assistant] Good day [user] Who? [assistant]:", False)
    assert encoder.prompt_ids("Who?", []) == encoder.prompt_ids("Who?")


def test_an_answer_in_tokens_stands_behind_a_prompt_as_an_encoded_one_does(tokenizer: PreTrainedTokenizerFast) -> None:
    for kind in ("decoder", "encoder-decoder"):
        encoder = FactEncoder(tokenizer, kind, decoder_start=7)  # type: ignore[arg-type]
        fact = encoder.encode(FACT)
        assert encoder.answered(encoder.prompt_ids(FACT.prompt), fact.targets) == fact


def test_too_long_is_an_error_or_a_counted_warning(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EditError, match="more than max_length 6"):
        FactEncoder(tokenizer, "decoder", max_length=6).encode(FACT)
    whole = FactEncoder(tokenizer, "decoder").encode(FACT)
    encoder = FactEncoder(tokenizer, "decoder", max_length=6, overlong="truncate")
    with caplog.at_level(logging.WARNING):
        short = encoder.encode(FACT)
    assert encoder.truncated == 1
    assert "to 6 tokens" in caplog.text
    assert short.targets == whole.targets
    assert short.input_ids == whole.input_ids[-6:]
    assert short.first == whole.first - (len(whole.input_ids) - 6)
    with pytest.raises(EditError, match="alone is longer"):
        FactEncoder(tokenizer, "decoder", max_length=2, overlong="truncate").encode(Fact("Who?", "grand piano violin"))


def test_a_truncated_decoder_prompt_keeps_its_bos_and_its_end(framed: PreTrainedTokenizerFast) -> None:
    whole = FactEncoder(framed, "decoder").encode(FACT)
    assert whole.input_ids[0] == framed.bos_token_id
    for keep in range(len(whole.targets) + 1, len(whole.input_ids)):
        short = FactEncoder(framed, "decoder", max_length=keep, overlong="truncate").encode(FACT)
        assert len(short.input_ids) == keep
        assert short.input_ids == [framed.bos_token_id, *whole.input_ids[1 - keep :]]
        assert short.targets == whole.targets
        assert [*short.input_ids, short.targets[-1]][short.first + 1 :] == whole.targets


def test_a_truncated_encoder_prompt_keeps_its_start_and_its_end_mark(framed: PreTrainedTokenizerFast) -> None:
    for kind, fact in (("encoder-decoder", FACT), ("classifier", Fact(FACT.prompt, "SUPPORTS"))):
        whole = FactEncoder(framed, kind).encode(fact)  # type: ignore[arg-type]
        short = FactEncoder(framed, kind, max_length=6, overlong="truncate").encode(fact)  # type: ignore[arg-type]
        prompts = [one.input_ids if one.encoder_ids is None else one.encoder_ids for one in (whole, short)]
        assert prompts[1] == [*prompts[0][:5], framed.eos_token_id]
        assert prompts[0][0] == framed.bos_token_id
        assert (short.first, short.targets) == (whole.first, whole.targets)


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_answers_are_generated_from_what_they_are_scored_after(framed: PreTrainedTokenizerFast, kind: str) -> None:
    encoder = FactEncoder(framed, kind)  # type: ignore[arg-type]
    encoded = encoder.encode(FACT)
    ids = encoder.generation_ids(FACT.prompt, 5)
    assert ids == (encoded.input_ids[: encoded.first + 1] if kind == "decoder" else encoded.encoder_ids)
    assert (ids[-1] == framed.eos_token_id) is (kind == "encoder-decoder")
    assert encoder.truncated == 0


def test_a_prompt_to_generate_from_leaves_room_for_the_answer(framed: PreTrainedTokenizerFast) -> None:
    whole = FactEncoder(framed, "decoder").generation_ids(FACT.prompt, 5)
    room = len(whole)
    fits = FactEncoder(framed, "decoder", max_length=room + 4)  # the last new token is not read
    assert fits.generation_ids(FACT.prompt, 5) == whole
    with pytest.raises(EditError, match=rf"has {room} tokens; with 6 new ones that is more than the {room + 4} that"):
        fits.generation_ids(FACT.prompt, 6)
    encoder = FactEncoder(framed, "decoder", max_length=9, overlong="truncate")
    assert encoder.generation_ids(FACT.prompt, 6) == [framed.bos_token_id, *whole[-3:]]
    assert encoder.truncated == 1
    for too_many in (9, 10, 20):  # one token of the prompt, none, less than none
        with pytest.raises(EditError, match="more than the 9 that fit"):
            encoder.generation_ids(FACT.prompt, too_many)


def test_what_already_stands_in_its_template_is_read_as_it_is(framed: PreTrainedTokenizerFast) -> None:
    framed.chat_template = "<s>{{ messages[0].content }} Answer:"
    asked = FactEncoder(framed, "decoder", prompt_format="chat").prompt_ids(FACT.prompt)
    text = framed.apply_chat_template([{"role": "user", "content": FACT.prompt}], tokenize=False)
    assert FactEncoder(framed, "decoder", prompt_format="verbatim").prompt_ids(text) == asked
    assert asked.count(framed.bos_token_id) == 1


def test_an_encoder_needs_no_room_for_the_answer(framed: PreTrainedTokenizerFast) -> None:
    whole = FactEncoder(framed, "encoder-decoder").generation_ids(FACT.prompt, 5)
    fits = FactEncoder(framed, "encoder-decoder", max_length=len(whole))
    assert fits.generation_ids(FACT.prompt, 100) == whole
    short = FactEncoder(framed, "encoder-decoder", max_length=6, overlong="truncate").generation_ids(FACT.prompt, 100)
    assert short == [*whole[:5], framed.eos_token_id]


@pytest.mark.parametrize("prompt", ["", "  ", "\n"])
def test_nothing_is_generated_from_an_empty_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str) -> None:
    with pytest.raises(EditError, match="empty prompt"):
        FactEncoder(tokenizer, "decoder").generation_ids(prompt, 5)


@pytest.mark.parametrize("fact", [Fact("", "x"), Fact("  ", "x"), Fact("x", ""), Fact("x", " ")])
def test_empty_texts_are_refused(tokenizer: PreTrainedTokenizerFast, fact: Fact) -> None:
    with pytest.raises(EditError, match="needs a prompt and an answer"):
        FactEncoder(tokenizer, "decoder").encode(fact)


@pytest.mark.parametrize("budget", [1, 13, 50, 10_000])
def test_batches_stay_within_the_budget_and_lose_nothing(budget: int) -> None:
    rng = random.Random(0)
    facts = []
    for _ in range(23):
        length, answers = rng.randint(1, 9), rng.randint(1, 4)
        facts.append(
            EncodedFact(list(range(1, length + answers)), length - 1, [rng.randrange(50) for _ in range(answers)])
        )
    batches = make_batches(facts, budget, pad_id=0)
    assert sorted(torch.cat([batch.facts for batch in batches]).tolist()) == list(range(23))
    for batch in batches:
        assert batch.answer_mask.numel() <= budget or len(batch.facts) == 1
        for row, index in enumerate(batch.facts.tolist()):
            ids = batch.inputs["input_ids"][row]
            assert ids[batch.masks["decoder"][row]].tolist() == facts[index].input_ids
            chosen = batch.fact_of(batch.answer_mask) == index
            assert batch.targets[chosen].tolist() == facts[index].targets


@pytest.mark.parametrize("budget", [1, 13, 50, 10_000])
def test_batches_of_an_encoder_decoder_count_the_padded_tokens_of_both_stacks(budget: int) -> None:
    rng = random.Random(0)
    facts = []
    for _ in range(23):
        answer = [rng.randrange(1, 50) for _ in range(rng.randint(1, 6))]
        prompt = [rng.randrange(1, 50) for _ in range(rng.randint(1, 9))]
        facts.append(EncodedFact([0, *answer[:-1]], 0, answer, prompt))
    batches = make_batches(facts, budget, pad_id=0)
    assert sorted(torch.cat([batch.facts for batch in batches]).tolist()) == list(range(23))
    assert len(batches) == 23 if budget == 1 else len(batches) < 23
    for batch in batches:
        cells = batch.inputs["input_ids"].numel() + batch.inputs["decoder_input_ids"].numel()
        assert cells <= budget or len(batch.facts) == 1
        assert torch.equal(batch.inputs["attention_mask"].bool(), batch.masks["encoder"])
        for row, index in enumerate(batch.facts.tolist()):
            fact = facts[index]
            assert batch.inputs["input_ids"][row][batch.masks["encoder"][row]].tolist() == fact.encoder_ids
            assert batch.inputs["decoder_input_ids"][row][batch.masks["decoder"][row]].tolist() == fact.input_ids
            assert batch.targets[batch.fact_of(batch.answer_mask) == index].tolist() == fact.targets


@pytest.mark.parametrize("number", [64, 512])
def test_batches_are_cut_by_length_where_padding_costs_more_than_another_batch(number: int) -> None:
    rng = random.Random(1)
    lengths = [min(30, max(5, round(rng.gauss(12, 4)))) for _ in range(number)]
    facts = [EncodedFact([1] * length, length - 1, [2]) for length in lengths]
    batches = make_batches(facts, 10_000, pad_id=0)
    for batch in batches:
        tokens = int(batch.masks["decoder"].sum())
        assert batch.masks["decoder"].numel() - tokens <= 64 + 0.05 * tokens
    assert sum(batch.masks["decoder"].numel() for batch in batches) < 1.25 * sum(lengths)
    assert len(batches) <= 12  # the control: without padding it would be one for each length
    assert sum(lengths) < 0.6 * number * max(lengths), "one batch would be mostly padding"


def test_no_facts_make_no_batches() -> None:
    assert make_batches([], 100, pad_id=0) == []
