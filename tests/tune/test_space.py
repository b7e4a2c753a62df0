from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from ray.tune.search import Searcher
from tiny_models import tiny_lm
from torch import nn

from malmen.config import Config
from malmen.errors import UsageError
from malmen.tune.settings import SweepConfig, parse_sweep
from malmen.tune.space import (
    LAYERS,
    SweepSearch,
    check_space,
    draw,
    is_integer,
    number_of_trials,
    with_evaluations,
)
from malmen.tune.sweep_folder import Judgement, SweepFolder
from malmen.tune.trial import trial_config


def space(**changes: Any) -> SweepConfig:
    return parse_sweep({"layer_sets": ["last:1", "last:2"], **changes}, "the test")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_lm("gpt2").model


def test_a_trials_config_is_the_base_with_its_parameters() -> None:
    sweep = space(layer_sets={"a": {"layers": "last:1", "ffn": "first"}, "b": ["x.y"]})
    found = trial_config(Config(), sweep, {LAYERS: "a", "training.locality_coef": 3.0, "editor.rank": 7})
    assert (found.editor.layers, found.editor.ffn, found.editor.rank) == ("last:1", "first", 7)
    assert found.training.locality_coef == 3.0
    other = trial_config(Config(), sweep, {LAYERS: "b"})
    assert (other.editor.layers, other.editor.ffn) == (["x.y"], Config().editor.ffn)
    assert other.training == Config().training


def test_a_layer_set_that_the_model_does_not_have_is_an_error_before_any_trial(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"layer set 'last:9'.*K must be 1 to"):
        check_space(Config(), space(layer_sets=["last:1", "last:9"]), model)
    with pytest.raises(UsageError, match=r"layer set 'mine'.*the nearest linear layers are transformer\.h"):
        check_space(Config(), space(layer_sets={"mine": ["transformer.h.0.mlp.c_prj"]}), model)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"training.localty_coef": [1.0]}, "the settings that can be are"),
        ({"model.name": ["a"]}, "model.name cannot be swept"),
        ({"batch.token_budget": [1]}, "batch.token_budget cannot be swept"),
        ({"training.steps": [1]}, "compared after the same steps"),
        ({"editor.layers": ["all"]}, "layer_sets"),
        ({"editor.ffn": ["first"]}, "layer sets"),
        ({"editor.tokens": ["all", "some"]}, "'answer' or 'all'"),
        ({"editor.rank": [8, 0]}, "editor.rank"),
        ({"editor.rank": {"low": 0, "high": 8}}, "editor.rank"),
        ({"editor.rank": {"low": 1.5, "high": 8}}, "editor.rank"),
        ({"editor.rank": []}, "no choices"),
        ({"editor.regularisation": {"low": 0, "high": 1}}, "editor.regularisation is not a number"),
    ],
)
def test_a_parameter_that_no_trial_could_have_is_an_error(
    model: nn.Module, parameters: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as found:
        check_space(Config(), space(parameters=parameters), model)
    assert said in str(found.value)


def test_a_space_that_is_empty_or_a_grid_with_a_range_is_an_error(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="empty"):
        check_space(Config(), space(layer_sets=[]), model)
    ranged = {"training.locality_coef": {"low": 0.1, "high": 1.0}}
    with pytest.raises(UsageError, match="a grid needs choices"):
        check_space(Config(), space(search="grid", parameters=ranged), model)


def test_without_layer_sets_the_configs_own_layers_are_checked(model: nn.Module) -> None:
    sweep = space(layer_sets=[], parameters={"editor.rank": [8]})
    with pytest.raises(UsageError, match="layer rule 'last:6'"):
        check_space(Config(), sweep, model)


def test_every_editor_setting_of_the_paper_can_be_swept(model: nn.Module) -> None:
    parameters = {
        "editor.rank": [8, 16],
        "editor.blocks": [1, 2],
        "editor.tokens": ["answer", "all"],
        "editor.aggregation": ["least_squares", "sum"],
        "editor.edit_lr": {"low": 1e-6, "high": 1e-2, "log": True},
        "training.meta_lr": {"low": 1e-6, "high": 1e-2, "log": True},
        "seed": [0, 1, 2],
    }
    sets = {"first": {"layers": "last:1", "ffn": "first"}, "second": {"layers": "last:1", "ffn": "second"}}
    sweep = space(parameters=parameters, layer_sets=sets)
    check_space(Config(), sweep, model)
    for number in range(10):
        trial_config(Config(), sweep, draw(sweep, number))


def test_draws_depend_on_seed_and_number_alone_and_stay_in_their_ranges() -> None:
    parameters = {"training.locality_coef": {"low": 0.1, "high": 10, "log": True}, "editor.rank": {"low": 4, "high": 9}}
    sweep = space(parameters=parameters)
    drawn = [draw(sweep, number) for number in range(200)]
    assert drawn == [draw(sweep, number) for number in reversed(range(200))][::-1]
    assert drawn[0] != draw(space(parameters=parameters, seed=1), 0)
    assert {params["editor.rank"] for params in drawn} == set(range(4, 10))
    coefs = [params["training.locality_coef"] for params in drawn]
    assert 0.1 <= min(coefs) < max(coefs) <= 10
    assert abs(sum(math.log10(coef) for coef in coefs) / len(coefs)) < 0.15  # as many below 1 as above


def test_a_sweep_that_an_earlier_version_began_is_resumed_with_the_trials_it_had_planned() -> None:
    """Drawn by commit 0f6b2bd: the trials that have not begun are on no disk, so the draws must never change."""
    coef = "training.locality_coef"
    parameters = {
        coef: {"low": 0.1, "high": 10, "log": True},
        "editor.rank": {"low": 4, "high": 9},
        "editor.tokens": ["answer", "all"],
    }
    sweep = space(seed=5, parameters=parameters)
    expected = {
        0: {LAYERS: "last:2", coef: 0.22091848201704023, "editor.rank": 4, "editor.tokens": "answer"},
        1: {LAYERS: "last:1", coef: 7.144755688936319, "editor.rank": 7, "editor.tokens": "all"},
        7: {LAYERS: "last:1", coef: 0.8175595159879693, "editor.rank": 4, "editor.tokens": "answer"},
    }
    for number, params in expected.items():
        assert draw(sweep, number) == {**params, coef: pytest.approx(params[coef], rel=1e-12)}
    grid = space(search="grid", parameters={"editor.rank": [8, 16, 32]})
    assert [draw(grid, number)["editor.rank"] for number in (1, 4)] == [16, 16]


def test_a_few_random_trials_are_spread_over_every_range() -> None:
    parameters = {name: {"low": 0.0, "high": 1.0} for name in ("training.locality_coef", "editor.damping")}
    drawn = [draw(space(parameters=parameters, seed=seed), number) for seed in range(5) for number in range(8)]
    for name in parameters:
        for seed in range(5):
            places = sorted(params[name] for params in drawn[8 * seed : 8 * seed + 8])
            assert max(high - low for low, high in itertools.pairwise([0.0, *places, 1.0])) < 0.35


def test_whole_numbers_are_drawn_where_the_setting_is_integer_not_where_the_range_looks_so() -> None:
    assert is_integer("editor.rank") and is_integer("seed") and not is_integer("training.locality_coef")
    coef = draw(space(parameters={"training.locality_coef": {"low": 1, "high": 10}}), 0)["training.locality_coef"]
    assert coef != round(coef)


def test_a_few_random_trials_try_every_layer_set_as_often() -> None:
    sweep = space(layer_sets=["last:1", "last:2", "first:1"])
    counts = Counter(draw(sweep, number)[LAYERS] for number in range(9))
    assert set(counts.values()) == {3}


def test_a_grid_has_every_point_once() -> None:
    sweep = space(search="grid", trials=100, parameters={"editor.rank": [8, 16], "editor.tokens": ["answer", "all"]})
    points = [tuple(draw(sweep, number).values()) for number in range(number_of_trials(sweep))]
    assert len(points) == len(set(points)) == 8
    assert number_of_trials(space(search="grid", trials=1)) == 1


def test_trials_are_evaluated_and_saved_where_early_stopping_looks() -> None:
    config, grace = with_evaluations(Config.model_validate({"training": {"steps": 80}}), space())
    assert (grace, config.training.eval_every, config.training.checkpoint_every) == (10, 10, 10)
    assert config.training.eval_edits == config.training.num_edits  # also where num_edits is swept
    config, grace = with_evaluations(Config.model_validate({"training": {"eval_every": 5}}), space(grace_steps=20))
    assert (grace, config.training.eval_every, config.training.checkpoint_every) == (20, 5, 5)
    with pytest.raises(UsageError, match=r"not a multiple of training\.eval_every=30"):
        with_evaluations(Config.model_validate({"training": {"eval_every": 30}}), space(grace_steps=40))
    with pytest.raises(UsageError, match=r"more than training\.steps=10"):
        with_evaluations(Config.model_validate({"training": {"steps": 10}}), space(grace_steps=40))


# --- which trial comes next --------------------------------------------------------------------------

COEF = "training.locality_coef"


def searched(**changes: Any) -> SweepConfig:
    raw = {
        "trials": 6,
        "layer_sets": ["last:1", "last:2"],
        "parameters": {COEF: {"low": 0.1, "high": 10.0, "log": True}, "editor.rank": {"low": 4, "high": 8}},
    }
    return parse_sweep({**raw, **changes}, "the test")


def play(folder: SweepFolder, sweep: SweepConfig, number: int) -> None:
    """A search whose trials end one after the other, with a score that the coefficient decides."""
    search = SweepSearch(folder, sweep)
    for index in range(number):
        found = search.suggest(f"id{index}")
        assert isinstance(found, dict)
        trial = folder.get(found["number"])
        assert trial is not None
        score = 1 / (1 + abs(trial.params[COEF] - 1))
        if not trial.ended:
            folder.put(replace(trial.judged(Judgement(3, score, {}, 0.0)), status="finished"))
        search.on_trial_complete(f"id{index}", {"score": score, "failed": ""})


def params(folder: SweepFolder) -> list[dict[str, Any]]:
    return [trial.params for trial in folder.trials()]


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_a_search_that_was_killed_and_goes_on_tries_what_it_would_have_tried(tmp_path: Path, kind: str) -> None:
    sweep = searched(search=kind)
    whole, cut = SweepFolder(tmp_path / "whole"), SweepFolder(tmp_path / "cut")
    play(whole, sweep, 6)
    play(cut, sweep, 3)
    before = params(cut)
    play(cut, sweep, 6)
    assert params(cut)[:3] == before
    assert params(cut) == params(whole)
    assert len({str(found) for found in params(whole)}) == 6


@pytest.mark.parametrize("kind", ["random", "grid", "optuna"])
def test_a_trial_is_on_disk_before_ray_tune_hears_of_it_and_there_are_no_more_than_asked_for(
    tmp_path: Path, kind: str
) -> None:
    folder = SweepFolder(tmp_path)
    search = SweepSearch(folder, searched(search=kind, trials=3, parameters={COEF: [0.5, 1.0]}))
    for number in range(3):
        assert search.suggest(f"id{number}") == {"number": number}
        assert len(folder.trials()) == number + 1
    assert search.suggest("another") == Searcher.FINISHED
    assert len(folder.trials()) == 3


def test_optuna_learns_from_trials_that_have_ended(tmp_path: Path) -> None:
    def middle_miss(kind: str) -> float:
        folder = SweepFolder(tmp_path / kind)
        only = {"parameters": {COEF: {"low": 0.01, "high": 100.0, "log": True}}, "layer_sets": []}
        play(folder, searched(search=kind, trials=40, **only), 40)
        return median(abs(math.log(found[COEF])) for found in params(folder)[20:])

    assert middle_miss("optuna") < 0.5 * middle_miss("random")


def test_a_trial_that_failed_is_told_to_optuna_as_failed(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    search = SweepSearch(folder, searched(search="optuna"))
    for number, result in enumerate(({"score": 0.0, "failed": "why"}, None, {"score": 0.5, "failed": ""})):
        search.suggest(f"id{number}")
        search.on_trial_complete(f"id{number}", result, error=result is None)
    assert search._optuna is not None
    states = [trial.state.name for trial in search._optuna.study.trials]
    assert states == ["FAIL", "FAIL", "COMPLETE"]


def test_what_ended_before_a_kill_is_known_to_optuna_before_anything_new_is_drawn(tmp_path: Path) -> None:
    folder, sweep = SweepFolder(tmp_path), searched(search="optuna")
    play(folder, sweep, 3)
    search = SweepSearch(folder, sweep)
    for index in range(3):  # all of them at once, as two trials at a time would be
        search.suggest(f"id{index}")
    assert search._optuna is not None
    assert [trial.state.name for trial in search._optuna.study.trials] == ["COMPLETE"] * 3
    search.on_trial_complete("id0", {"score": 0.0, "failed": ""})  # Ray Tune hears of it later
    assert search._optuna.study.trials[0].value == folder.trials()[0].judgements[-1].score
