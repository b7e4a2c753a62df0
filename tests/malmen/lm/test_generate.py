from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_lm

from malmen.config import DataConfig
from malmen.data.world import world_records
from malmen.errors import EditError
from malmen.lm.generate import ask, continue_prompts, decode, generate_ids
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, fact_encoder, load_lm
from malmen.lm.overlay import edited

PROMPTS = [record.edit.prompt for record in world_records("validation")[:5]]


def with_words(name: str, lm: LanguageModel) -> LanguageModel:
    """A tiny model that reads the built-in world's tokens."""
    model: Any = tiny_lm(name).model
    torch.manual_seed(1)
    model.resize_token_embeddings(len(lm.tokenizer), mean_resizing=False)
    return LanguageModel(model, lm.tokenizer, "encoder-decoder" if name == "t5" else "decoder")


@pytest.fixture(params=["builtin", "gpt2", "llama", "t5"])
def speaker(request: pytest.FixtureRequest, lm: LanguageModel) -> LanguageModel:
    """A model that generates: the built-in one, which knows where to stop, and random ones of several kinds."""
    return lm if request.param == "builtin" else with_words(request.param, lm)


@torch.no_grad()
def by_hand(lm: LanguageModel, ids: list[int], number: int) -> list[int]:
    """The most probable token, appended and read again from the start, up to the end mark."""
    model: Any = lm.model
    found: list[int] = []
    while len(found) < number and lm.tokenizer.eos_token_id not in found:
        if lm.kind == "encoder-decoder":
            answer = torch.tensor([[lm.decoder_start, *found]])
            logits = model(input_ids=torch.tensor([ids]), decoder_input_ids=answer, use_cache=False).logits
        else:
            logits = model(input_ids=torch.tensor([[*ids, *found]]), use_cache=False).logits
        found.append(int(logits[0, -1].argmax()))
    return found


def up_to_the_end(lm: LanguageModel, ids: list[int]) -> list[int]:
    end = lm.tokenizer.eos_token_id
    return ids[: ids.index(end) + 1] if end in ids else ids


@pytest.mark.slow
def test_generation_is_the_most_probable_token_step_by_step(speaker: LanguageModel) -> None:
    encoder = fact_encoder(speaker, DataConfig())
    lengths = {len(encoder.prompt_ids(prompt)) for prompt in PROMPTS}
    assert len(lengths) > 1
    for budget in (1, 40, 4096):
        found = generate_ids(speaker, encoder, PROMPTS, 7, budget)
        for prompt, ids in zip(PROMPTS, found, strict=True):
            assert up_to_the_end(speaker, ids) == by_hand(speaker, encoder.prompt_ids(prompt), 7)


@pytest.mark.slow
def test_prompts_together_are_answered_like_each_by_itself(speaker: LanguageModel) -> None:
    together = ask(speaker, PROMPTS, 7)
    assert together == [ask(speaker, prompt, 7) for prompt in PROMPTS]
    assert ask(speaker, PROMPTS[::-1], 7) == together[::-1]
    assert ask(speaker, [], 7) == []


def test_each_prompt_has_its_own_limit_and_progress_counts_prompts(lm: LanguageModel) -> None:
    encoder = fact_encoder(lm, DataConfig())
    long = generate_ids(lm, encoder, [*PROMPTS, PROMPTS[0]], 4)
    progress: list[tuple[int, int]] = []
    limits = [1, 2, 3, 4, 2, 4]
    limited = generate_ids(
        lm, encoder, [*PROMPTS, PROMPTS[0]], limits, on_progress=lambda done, total: progress.append((done, total))
    )
    assert limited == [ids[:limit] for ids, limit in zip(long, limits, strict=True)]
    assert progress[-1] == (6, 6) and progress == sorted(set(progress))


@pytest.mark.slow
def test_an_edit_is_heard_in_what_is_generated(speaker: LanguageModel) -> None:
    torch.manual_seed(2)
    shifts = {
        layer.name: torch.randn(layer.value_size, layer.key_size) for layer in find_layers(speaker.model, "last:2")
    }
    encoder = fact_encoder(speaker, DataConfig())
    before = generate_ids(speaker, encoder, PROMPTS, 7)
    with edited(speaker, shifts):
        after = generate_ids(speaker, encoder, PROMPTS, 7)
        for prompt, ids in zip(PROMPTS, after, strict=True):
            assert up_to_the_end(speaker, ids) == by_hand(speaker, encoder.prompt_ids(prompt), 7)
    assert after != before
    assert generate_ids(speaker, encoder, PROMPTS, 7) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 2.0, "top_p": 0.9},
        {"repetition_penalty": 2.0},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 9},
        {"num_beams": 3},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_generation_settings_that_come_with_a_model_do_not_change_what_is_most_probable(
    lm: LanguageModel, settings: dict[str, Any]
) -> None:
    """Instruction-tuned models ship some: what they would sample is not what the edit made most probable."""
    speaker = load_lm("builtin") if "min_new_tokens" in settings else with_words("llama", lm)
    encoder = fact_encoder(speaker, DataConfig())
    expected = [by_hand(speaker, encoder.prompt_ids(prompt), 12) for prompt in PROMPTS]
    model: Any = speaker.model
    model.generation_config.update(**settings)
    assert [up_to_the_end(speaker, ids) for ids in generate_ids(speaker, encoder, PROMPTS, 12)] == expected


def test_the_built_in_model_says_what_it_knows_and_stops(lm: LanguageModel) -> None:
    facts = [fact for record in world_records("validation")[:5] for fact in record.unrelated]
    assert ask(lm, [fact.prompt for fact in facts], 12) == [fact.answer for fact in facts]


def test_a_decoded_answer_ends_before_the_end_mark(lm: LanguageModel) -> None:
    words = lm.tokenizer(" grand piano")["input_ids"]
    end = lm.tokenizer.eos_token_id
    assert decode(lm, words) == decode(lm, [*words, end, *words]) == decode(lm, [*words, end, end]) == "grand piano"
    assert decode(lm, [end, *words]) == ""


def test_a_classifier_is_refused(lm: LanguageModel) -> None:
    classifier = LanguageModel(tiny_lm("bert").model, lm.tokenizer, "classifier")
    with pytest.raises(EditError, match="does not generate"):
        ask(classifier, "Rome is in Italy.")


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_refused(lm: LanguageModel, prompt: str) -> None:
    with pytest.raises(EditError, match="empty prompt"):
        ask(lm, ["Who?", prompt])


def test_a_prompt_that_leaves_no_room_for_the_answer_is_refused_or_truncated(lm: LanguageModel) -> None:
    prompt = "Who is Ada? " * 3
    room = 64 - len(lm.tokenizer(prompt)["input_ids"]) + 1  # the last one is not read
    assert isinstance(ask(lm, prompt, room), str)
    with pytest.raises(EditError, match=r"more than the 64 that fit"):
        ask(lm, prompt, room + 1)
    with pytest.raises(EditError, match=r"more than the 64 that fit"):
        ask(lm, "Who? " * 100)
    assert isinstance(ask(lm, "Who? " * 100, data=DataConfig(overlong="truncate")), str)
    with pytest.raises(EditError, match=r"more than the 64 that fit"):  # nothing would be left of the prompt
        ask(lm, prompt, 64, DataConfig(overlong="truncate"))


def test_a_model_that_must_say_something_never_chooses_its_end_mark(lm: LanguageModel) -> None:
    known = world_records("validation")[0].unrelated[0]
    ids = [fact_encoder(lm, DataConfig()).prompt_ids(f"{known.prompt} {known.answer}")]
    (free,), (forced,) = continue_prompts(lm, ids, [6]), continue_prompts(lm, ids, [6], must_say=True)
    assert free[0] == lm.tokenizer.eos_token_id
    assert len(forced) == 6 and lm.tokenizer.eos_token_id not in forced
