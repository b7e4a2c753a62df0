"""The unedited model's own texts: who writes them and how the work is cut changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_folders import write_model
from tiny_models import tiny_lm
from worded_models import worded_lm

from malmen.config import Config
from malmen.data.records import EditRecord, Fact, unrelated_to_all
from malmen.data.world import world_records
from malmen.errors import EditError, UsageError
from malmen.lm.generate import generate_ids
from malmen.lm.model import LanguageModel, fact_encoder, load_lm
from malmen.lm.own_text import (
    evaluation_texts,
    find_forms,
    near_misses,
    own_texts,
    rewritten_texts,
    training_starts,
    write_texts,
)


def _config(folder: Path, **own: object) -> Config:
    return Config.model_validate({"own_text": {"texts": 40, "max_tokens": 12, "folder": str(folder), **own}})


def test_greedy_texts_are_what_the_model_answers_and_end_with_its_end_mark(lm: LanguageModel, tmp_path: Path) -> None:
    records = world_records("validation")[:20]
    texts = evaluation_texts(lm, _config(tmp_path), records, 30)["raw"]
    prompts = list(dict.fromkeys(fact.prompt for facts in unrelated_to_all(records) for fact in facts))[:30]
    answers = generate_ids(lm, fact_encoder(lm, Config().data), prompts, 12)
    assert len(texts) == len(prompts) == 30
    for text, prompt, answer in zip(texts, prompts, answers, strict=True):
        ids = [*text.input_ids, text.targets[-1]]
        assert ids[: text.first + 1] == lm.tokenizer(prompt)["input_ids"]
        assert ids[text.first + 1 :] == text.targets == answer[: len(text.targets)]
        assert text.targets.index(lm.tokenizer.eos_token_id) == len(text.targets) - 1


def test_a_rewritten_text_is_the_same_text_behind_another_prompt(lm: LanguageModel, tmp_path: Path) -> None:
    records, config = world_records("validation")[:20], _config(tmp_path)
    texts = evaluation_texts(lm, config, records, 30)
    prompts = list(dict.fromkeys(fact.prompt for facts in unrelated_to_all(records) for fact in facts))[:30]
    read = rewritten_texts(lm, config, records, texts, lambda prompt: f"Well. {prompt}")
    for text, old, prompt in zip(read["raw"], texts["raw"], prompts, strict=True):
        ids = lm.tokenizer(f"Well. {prompt}")["input_ids"]
        assert (text.input_ids, text.first, text.targets) == (
            ids + old.targets[:-1], len(ids) - 1, old.targets,
        )  # fmt: skip
    assert rewritten_texts(lm, config, records, texts, str) == texts


def test_a_text_that_ends_at_once_is_a_text(lm: LanguageModel, tmp_path: Path) -> None:
    known = world_records("validation")[0].unrelated[0]
    complete = EditRecord(known, unrelated=(Fact(f"{known.prompt} {known.answer}", "?"),))
    (text,) = evaluation_texts(lm, _config(tmp_path), [complete], 1)["raw"]
    assert text.targets == [lm.tokenizer.eos_token_id]


def test_shares_of_the_work_give_the_texts_of_the_whole(lm: LanguageModel, tmp_path: Path) -> None:
    starts = training_starts(lm, _config(tmp_path, texts=300), world_records("train")[:200])
    assert {start.sampled for start in starts} == {True, False}
    whole = write_texts(lm, starts, 8, seed=3)
    parts: list[dict[int, list[list[int]]]] = []

    def keep(mine: dict[int, list[list[int]]]) -> list[dict[int, list[list[int]]]]:
        parts.append(mine)
        return [mine]

    for rank in range(2):
        with pytest.raises(KeyError):  # half of the texts is missing
            write_texts(lm, starts, 8, seed=3, share=slice(rank, None, 2), gather=keep)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    assert write_texts(lm, starts, 8, seed=3, share=slice(0, 0), gather=lambda _mine: parts) == whole
    assert write_texts(lm, starts, 8, seed=4) != whole
    assert torch.equal(torch.get_rng_state(), before)  # what is drawn here is nobody else's


def test_texts_are_written_once_and_then_read(lm: LanguageModel, tmp_path: Path) -> None:
    config, records = _config(tmp_path), world_records("train")[:50]
    first = own_texts(lm, config, records)
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text())
    assert [text.fact.targets for text in first] == rows
    file.write_text(json.dumps([[7], *rows[1:]]))
    again = own_texts(lm, config, records)
    assert again[0].fact.targets == [7] and again[1:] == first[1:]
    other = config.model_copy(update={"seed": 1})
    assert own_texts(lm, other, records) != first and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["t5", "gpt2", "llama"])
def test_other_kinds_of_models_write_too(name: str, tmp_path: Path) -> None:
    lm = worded_lm(name) if name == "llama" else load_lm(str(write_model(name, tmp_path / name)))
    record = EditRecord(Fact("a", "b"), unrelated=(Fact("a b c", "d"), Fact("e f", "g")))
    texts = own_texts(lm, _config(tmp_path / "cache", texts=8), [record])
    assert texts and all(1 <= len(text.fact.targets) <= 12 for text in texts)
    assert all((text.fact.encoder_ids is None) == (name != "t5") for text in texts)


def test_a_chat_template_is_used_where_there_is_one(lm: LanguageModel, tmp_path: Path) -> None:
    assert find_forms(lm, _config(tmp_path).own_text) == ["raw"]
    with pytest.raises(UsageError, match="no chat template"):
        find_forms(lm, _config(tmp_path, forms="chat").own_text)
    chatting = load_lm(Config().model)
    chatting.tokenizer.chat_template = "Q: {{ messages[0].content }} A:"
    texts = evaluation_texts(chatting, _config(tmp_path), world_records("validation")[:3], 2)
    assert list(texts) == ["raw", "chat"]
    assert chatting.tokenizer.decode(texts["chat"][0].input_ids).startswith("Q: ")


def test_a_classifier_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a classifier writes no texts"):
        own_texts(tiny_lm("bert"), _config(tmp_path), [])


def test_a_cache_that_cannot_be_written_is_a_clear_error(lm: LanguageModel, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(EditError, match=r"cannot write to .*own_text\.folder"):
        own_texts(lm, _config(blocked), world_records("train")[:5])


def test_near_misses_are_what_the_model_answers_greedily_in_the_form_of_edits_and_are_written_once(
    lm: LanguageModel, tmp_path: Path
) -> None:
    config, records = _config(tmp_path, texts=20), world_records("train")[:50]
    first = near_misses(lm, config, records)
    assert len(first.answered) == 20
    answers = generate_ids(lm, fact_encoder(lm, config.data), [asked.prompt for asked, _ in first.answered], 12)
    for (asked, text), answer in zip(first.answered, answers, strict=True):
        assert text.input_ids[: text.first + 1] == lm.tokenizer(asked.prompt)["input_ids"]
        assert text.targets == answer[: len(text.targets)]
        assert text.targets[-1] == lm.tokenizer.eos_token_id or len(text.targets) == 12
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([[7], *rows[1:]]))
    again = near_misses(lm, config, records)
    assert again.answered[0][1].targets == [7] and again.answered[1:] == first.answered[1:]


def test_near_misses_are_asked_in_the_chat_template_where_edits_are(tmp_path: Path) -> None:
    chatting = load_lm(Config().model)
    chatting.tokenizer.chat_template = "Q: {{ messages[0].content }} A:"
    config = Config.model_validate({**_config(tmp_path, texts=3).model_dump(), "data": {"prompt_format": "chat"}})
    for asked, text in near_misses(chatting, config, world_records("train")[:5]).answered:
        prompt = chatting.tokenizer.decode(text.input_ids[: text.first + 1])
        assert prompt == f"Q: {asked.prompt} A:"


def test_a_classifier_answers_no_near_misses(tmp_path: Path) -> None:
    config = Config.model_validate({"data": {"near_misses": 2}})
    with pytest.raises(UsageError, match=r"data\.near_misses is 2, but a classifier writes no texts: use 0"):
        near_misses(tiny_lm("bert"), config, [])
