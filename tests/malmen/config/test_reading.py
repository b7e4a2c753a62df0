from __future__ import annotations

from pathlib import Path

import pytest

from malmen.config import Config, flatten, known_keys, load_config, parse_config, stored_config
from malmen.errors import UsageError


def test_defaults_are_the_papers() -> None:
    config = Config()
    assert (config.editor.rank, config.editor.blocks, config.editor.edit_lr) == (1920, 2, 1e-6)
    assert (config.training.meta_lr, config.training.locality_coef, config.training.max_grad_norm) == (1e-5, 1.0, 1.0)
    assert (config.editor.layers, config.editor.ffn, config.editor.tokens) == ("last:6", "second", "answer")


def test_overrides_win_over_the_file_and_short_names_are_enough(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("editor: {rank: 8, edit_lr: 1e-3}\nseed: 3\n")
    config = load_config(file, ["editor.rank=16", "aggregation=sum", "layers=[a.b, c.d]", "meta_lr=1e-4"])
    assert (config.editor.rank, config.editor.edit_lr, config.seed) == (16, 1e-3, 3)
    assert (config.editor.aggregation, config.editor.layers, config.training.meta_lr) == ("sum", ["a.b", "c.d"], 1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("editor.rnak=3", r"unknown key 'editor.rnak'; did you mean editor.rank"),
        ("rank=three", r"editor.rank: .*given 'three'"),
        ("rank=-1", r"editor.rank: .*greater than 0"),
        ("training.steps=0", r"training.steps: .*greater than 0"),
        ("aggregation=mean", r"'least_squares' or 'sum'"),
        ("rank", r"expected `key=value`"),
        ("seed.x=1", r"not a section|valid integer"),
    ],
)
def test_a_wrong_setting_says_what_was_given_and_what_exists(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(None, [override])


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"c\.yaml"):
        load_config(file)
    with pytest.raises(UsageError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_every_shipped_config_is_valid_and_names_no_machine() -> None:
    shipped = sorted((Path(__file__).parents[3] / "platform" / "configs").glob("*.yaml"))
    assert {path.stem for path in shipped} == {
        "bert-base",
        "builtin",
        "gpt-j",
        "gpt2",
        "llama-3-70b",
        "llama-3-8b",
        "smollm2-135m",
        "smollm2-135m-32",
        "t5-xl",
    }
    for path in shipped:
        load_config(path)
        assert path.read_text().startswith("# ")


def test_a_config_survives_its_own_json() -> None:
    config = load_config(None, ["layers=[a, b]", "scalar_lr=0.1"])
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert "training.scalar_lr" in known_keys()


def test_every_problem_of_a_config_is_named_once_in_one_message() -> None:
    with pytest.raises(UsageError) as caught:
        parse_config({"editor": {"rnak": 3}, "seed": "x"}, "run.yaml")
    message = str(caught.value)
    assert message.startswith("run.yaml: ")
    assert message.count("editor.rnak") == message.count("seed: ") == 1


def test_nested_values_are_flattened_by_dotted_keys_and_empty_sections_stay() -> None:
    assert flatten({"a": 1, "b": {"c": {"d": [2]}, "e": {}}}) == {"a": 1, "b.c.d": [2], "b.e": {}}
    assert set(flatten(Config().model_dump())) == set(known_keys())


def test_a_preset_lies_below_the_files_own_keys_and_above_the_file_as_an_override(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("preset: fast\neditor: {edit_lr: 0.25}\n")
    config = load_config(path)
    assert (config.editor.parametrisation, config.editor.edit_lr, config.training.meta_lr) == ("relative", 0.25, 1e-4)
    papers = load_config(path, ["preset=paper", "locality_coef=3"])
    assert papers == Config.model_validate({"training": {"locality_coef": 3}})
    assert load_config(path, ["edit_lr=0.5", "preset=fast"]).editor.edit_lr == 5e-4  # the later one wins
    with pytest.raises(UsageError, match=r"unknown preset 'quick': expected `paper` or `fast`"):
        load_config(path, ["preset=quick"])


def test_a_stored_config_is_older_than_the_parametrisation_if_it_does_not_name_it() -> None:
    stored = Config().model_dump(mode="json")
    assert stored_config(stored, "config.json") == Config()
    del stored["editor"]["parametrisation"]
    assert stored_config(stored, "config.json").editor.parametrisation == "relative"


def test_a_weight_that_is_to_be_learned_needs_a_start() -> None:
    with pytest.raises(UsageError, match=r"editor: learn_preserved_weight needs a preserved_weight above 0"):
        load_config(None, ["learn_preserved_weight=true"])
    assert load_config(None, ["learn_preserved_weight=true", "preserved_weight=1"]).editor.preserving
