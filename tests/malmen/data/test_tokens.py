from __future__ import annotations

import logging
import random

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, FactEncoder, make_batches
from malmen.data.world_model import WORLD_MODEL
from malmen.errors import EditError

FACT = Fact("Which instrument does Ada play?", "grand piano")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(WORLD_MODEL)


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
    from tokenizers.processors import TemplateProcessing

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
    assert "truncated to 6 tokens" in caplog.text
    assert short.targets == whole.targets
    assert short.input_ids == whole.input_ids[-6:]
    assert short.first == whole.first - (len(whole.input_ids) - 6)
    with pytest.raises(EditError, match="alone is longer"):
        FactEncoder(tokenizer, "decoder", max_length=2, overlong="truncate").encode(Fact("Who?", "grand piano violin"))


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
