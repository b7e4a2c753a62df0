"""Distributed = single process, in float64 to 1e-9: for every kind of LM and every way of cutting the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from platform_runs import make_platform_config
from torch.testing import assert_close

from malmen.checkpoint import load_editor
from malmen.config import Config
from malmen.editor import Editor
from malmen.platform.train import TrainedEditor, train
from malmen.sampling import validation_records
from malmen.training import evaluate_editor
from malmen.training import train as train_alone

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

Alone = Callable[[Config], tuple[Editor, dict[str, Any]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The same run in one process: its editor and its scores. Roles and cuts do not matter, so runs are shared."""
    known: dict[str, tuple[Editor, dict[str, Any]]] = {}

    def run(config: Config) -> tuple[Editor, dict[str, Any]]:
        key = config.model_dump_json(include={"model", "editor", "training"})
        if key not in known:
            found = train_alone(config, tmp_path_factory.mktemp("alone") / "run")
            scores = evaluate_editor(
                found.lm, found.editor, validation_records(config), config, generate=False
            ).scores()
            known[key] = (found.editor, scores)
        return known[key]

    return run


def assert_equal_runs(found: TrainedEditor, expected: tuple[Editor, dict[str, Any]]) -> None:
    """θ, normalisers and Adam to 1e-9; the shifts through what is measured of them."""
    editor, scores = expected
    distributed = load_editor(found.checkpoint, optimizer=True)
    assert distributed.steps_done == editor.steps_done
    # Adam divides by the gradient's own size, so where that is near zero a step of meta_lr = 1e-2 carries its rounding:
    # 1e-11 is 1e-9 of such a step.
    assert_close(dict(distributed.state_dict()), dict(editor.state_dict()), rtol=1e-9, atol=1e-11)
    assert_close(distributed.optimizer_state(), editor.optimizer_state(), rtol=1e-8, atol=1e-15)
    for name in ("mean_residual", "max_shift_ratio", "edit_success", "locality_success", "locality_agreement"):
        assert found.scores[name] == pytest.approx(scores[name], rel=1e-9), name


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert"])
def test_two_sharded_lm_ranks_and_two_actors_equal_one_process(
    kind: str, models: Path, tmp_path: Path, alone: Alone
) -> None:
    roles = {"lm_workers": 2, "hypernet_actors": 2}
    config = make_platform_config(kind, models, cluster=roles, lm={"sharding": "zero3"})
    assert_equal_runs(train(config, tmp_path / "run"), alone(config))


@pytest.mark.parametrize(
    ("lm_workers", "actors", "overlap"), [(1, 1, True), (2, 1, False), (1, 3, True)], ids=["1+1", "2+1", "1+3"]
)
def test_any_number_of_roles_equals_one_process(
    lm_workers: int, actors: int, overlap: bool, models: Path, tmp_path: Path, alone: Alone
) -> None:
    roles = {"lm_workers": lm_workers, "hypernet_actors": actors, "overlap": overlap}
    config = make_platform_config("gpt2", models, cluster=roles)
    assert_equal_runs(train(config, tmp_path / "run"), alone(config))


@pytest.mark.deepspeed
def test_one_edit_leaves_shares_empty_and_still_equals_one_process(models: Path, tmp_path: Path, alone: Alone) -> None:
    """Two ranks, one edit: a rank without edits runs as many forwards as the other. Three actors: one has no rows."""
    training = {"num_edits": 1, "equivalents_per_edit": 1}
    roles = {"lm_workers": 2, "hypernet_actors": 3}
    config = make_platform_config("gpt2", models, cluster=roles, training=training, lm={"sharding": "zero3"})
    assert_equal_runs(train(config, tmp_path / "run"), alone(config))


@pytest.mark.deepspeed
def test_the_cache_of_later_epochs_changes_nothing(models: Path, tmp_path: Path, alone: Alone) -> None:
    """Four epochs of two steps. Ranks find different facts in their caches and still run the same forwards."""
    training = {"num_edits": 19, "steps": 8, "checkpoint_every": 5}
    roles = {"lm_workers": 2, "hypernet_actors": 1}
    config = make_platform_config("gpt2", models, cluster=roles, training=training, lm={"sharding": "zero3"})
    found = train(config, tmp_path / "run")
    assert max(row.get("cache_mb", 0) for row in found.history) > 0
    without = config.model_copy(update={"batch": config.batch.model_copy(update={"cache_mb": 0})})
    assert_equal_runs(found, alone(without))


@pytest.mark.deepspeed
def test_a_model_loaded_in_parts_gives_the_whole_models_scores(models: Path, tmp_path: Path, alone: Alone) -> None:
    """In float32, where no rank ever holds all weights (a float64 model is loaded whole and cut then)."""
    roles = {"lm_workers": 2, "hypernet_actors": 1}
    model = {"dtype": "float32"}
    config = make_platform_config("gpt2", models, cluster=roles, model=model, lm={"sharding": "zero3"})
    found = train(config, tmp_path / "run")
    editor, scores = alone(config)
    assert_close(dict(load_editor(found.checkpoint).state_dict()), dict(editor.state_dict()), rtol=1e-3, atol=1e-4)
    assert found.scores["max_shift_ratio"] == pytest.approx(scores["max_shift_ratio"], rel=1e-3)
