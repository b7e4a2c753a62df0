from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import make_config
from transformers import AutoTokenizer

from malmen.config import Config, DataConfig, ModelConfig
from malmen.data.records import EditRecord, Fact
from malmen.data.splits import check_encodable, check_held_out, validation_records
from malmen.data.tokens import FactEncoder
from malmen.data.world import WORLD_MODEL
from malmen.errors import EditError, UsageError
from malmen.training import train as train_alone


def _about(data: DataConfig, **training: object) -> Config:
    return make_config(**training).model_copy(update={"data": data})


def test_held_out_records_of_a_file_come_in_an_order_that_the_seed_fixes(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    rows = [{"prompt": f"Question {number}?", "answer": "yes"} for number in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def prompts(seed: int) -> list[str]:
        config = Config.model_validate({"seed": seed, "data": {"validation": str(file)}})
        return [record.edit.prompt for record in validation_records(config)]

    assert prompts(0) == prompts(0) != prompts(1)
    assert sorted(prompts(0)) == sorted(prompts(1)) == sorted(str(row["prompt"]) for row in rows)


def test_held_out_facts_that_the_model_cannot_be_given_are_found_before_the_first_step(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    train.write_text(
        json.dumps({"prompt": "Who is it?", "answer": "Ada", "equivalents": [{"prompt": "Who?", "answer": "Ada"}]})
    )
    held_out.write_text(json.dumps({"prompt": "Who " * 100, "answer": "Ada"}))
    config = _about(DataConfig(train=str(train), validation=str(held_out)), num_edits=1)
    with pytest.raises(EditError, match="more than max_length 64"):
        train_alone(config, tmp_path / "run")
    assert not list(tmp_path.glob("run/checkpoint-*"))


def test_an_answer_that_is_no_class_is_found_too() -> None:
    encoder = FactEncoder(AutoTokenizer.from_pretrained(WORLD_MODEL), "classifier")
    check_encodable(encoder, [EditRecord(Fact("It rains.", "SUPPORTS"))])
    with pytest.raises(EditError, match=r"one of .*SUPPORTS"):
        check_encodable(encoder, [EditRecord(Fact("It rains.", "perhaps"))])


@pytest.mark.parametrize("given", ["train", "validation"])
def test_a_real_model_is_not_measured_by_the_invented_people(given: str) -> None:
    config = _about(DataConfig(**{given: "facts.jsonl"}))
    check_held_out(config)  # the built-in model knows them
    other = config.model_copy(update={"model": ModelConfig(name="gpt2")})
    with pytest.raises(UsageError, match=rf"data.{given} is a file and data.\w+ is not given.*'gpt2' knows nothing"):
        check_held_out(other)


def test_who_measures_on_what_was_trained_on_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"Who is number {n}?", "answer": "Ada", "equivalents": [f"Number {n} is"]} for n in range(4)]
    others = [{"prompt": "Number 2 is", "answer": "Bob"}, {"prompt": "Who is number 7?", "answer": "Bob"}]
    for name, written in (("train", rows), ("held_out", others)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in written))
    data = DataConfig(train=str(tmp_path / "train"), validation=str(tmp_path / "held_out"))
    train_alone(_about(data, num_edits=2, steps=1), tmp_path / "run")
    assert f"1 of the 2 held-out records of {tmp_path / 'held_out'} are edited in training too" in caplog.text
    assert "such as 'Number 2 is'" in caplog.text
    caplog.clear()
    train_alone(_about(DataConfig(), num_edits=2, steps=1), tmp_path / "other")
    assert "in training too" not in caplog.text
