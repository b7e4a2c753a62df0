"""Whatever is killed, and whenever: the run ends in the editor of an uninterrupted one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from chaos import dying_actor, dying_loop
from platform_runs import make_platform_config
from processes import role_processes, start_driver, wait_until, wait_until_nobody_works
from torch.testing import assert_close

from malmen.config import Config
from malmen.editor import Editor
from malmen.platform.train import Listener, train
from malmen.runs.checkpoint import load_editor
from malmen.training import train as train_alone

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.chaos]

STEPS = {"steps": 8, "checkpoint_every": 3, "locality_target": 0.01}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def uninterrupted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Editor:
    config = make_platform_config("gpt2", models, training=STEPS)
    return train_alone(config, tmp_path_factory.mktemp("alone") / "run").editor


def assert_same_editor(checkpoint: str | Path, expected: Editor) -> None:
    found = load_editor(checkpoint, optimizer=True)
    assert found.steps_done == expected.steps_done
    assert_close(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-6, atol=1e-9)
    assert_close(found.optimizer_state(), expected.optimizer_state(), rtol=1e-6, atol=1e-12)


@pytest.mark.usefixtures("ray_cluster")
def test_an_actor_is_killed_in_every_phase_of_a_step(
    models: Path, uninterrupted: Editor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = {
        1: ("put_traces", "after"),
        2: ("solve", "before"),
        3: ("solve", "after"),
        4: ("put_grads", "after"),
        5: ("backward", "before"),
        6: ("backward", "after"),
    }
    monkeypatch.setattr("malmen.platform.hypernet_group.HypernetActor", dying_actor(deaths, tmp_path))
    config = make_platform_config("gpt2", models, training=STEPS, cluster={"hypernet_actors": 2, "max_failures": 3})
    lost: list[str] = []
    found = train(config, tmp_path / "run", listener=Listener(event=lost.append))
    assert {path.name for path in tmp_path.glob("actor*")} == {f"actor{step}" for step in deaths}
    assert len(lost) >= len(deaths) - 1  # a death while nobody waits for the actor is seen one call later
    assert [row["step"] for row in found.history if "meta_loss" in row] == list(range(1, 9))
    assert_same_editor(found.checkpoint, uninterrupted)
    wait_until_nobody_works()


@pytest.mark.deepspeed
@pytest.mark.usefixtures("ray_cluster")
def test_lm_ranks_and_the_only_actor_are_killed(
    models: Path, uninterrupted: Editor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a peer to copy from, the actor goes back to the last checkpoint; the ranks have no state to lose."""
    monkeypatch.setattr(
        "malmen.platform.hypernet_group.HypernetActor", dying_actor({5: ("backward", "before")}, tmp_path)
    )
    deaths = {3: "meta_backward", 4: "trace"}
    monkeypatch.setattr("malmen.platform.train.train_loop", dying_loop(deaths, tmp_path))
    cluster = {"lm_workers": 2, "max_failures": 4}
    config = make_platform_config("gpt2", models, training=STEPS, cluster=cluster, lm={"sharding": "zero3"})
    found = train(config, tmp_path / "run")
    assert {path.name for path in tmp_path.glob("*[0-9]*")} == {"actor5", "lm3meta_backward", "lm4trace"}
    assert [row["step"] for row in found.history if "meta_loss" in row] == list(range(1, 9))
    assert_same_editor(found.checkpoint, uninterrupted)
    wait_until_nobody_works()


@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_driver_leaves_nothing_behind_and_the_same_command_goes_on(models: Path, tmp_path: Path) -> None:
    """Many steps: a driver hears of several at once, and must be killed long before the last."""
    from mlflow import MlflowClient

    steps = {"steps": 80, "checkpoint_every": 3}
    config = make_platform_config("gpt2", models, training=steps, tracking={"enabled": True})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    wait_until_nobody_works()
    driver = start_driver([sys.executable, "-m", "malmen.platform.train", "config.yaml", "--out", "run"], tmp_path)
    history = tmp_path / "run" / "history.jsonl"
    try:
        wait_until(lambda: history.exists() and len(history.read_text().splitlines()) >= 4, "step 4", 150, driver)
        assert len(role_processes()) >= 3
    finally:
        driver.kill()
        driver.wait(30)
    wait_until_nobody_works()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["facts"]["mlflow_run"]
    wait_until(lambda: client.get_run(run_id).info.status == "KILLED", "the end of the MLflow run")

    messages: list[str] = []
    again = train(config, tmp_path / "run", listener=Listener(event=messages.append))
    resumed = re.fullmatch(r"resuming .*/run after step (\d+)", messages[0])
    assert resumed and 3 <= int(resumed[1]) < 80, messages
    assert (again.steps, again.tracking_run) == (80, run_id)
    assert again.registered is not None and again.registered.uri.startswith("models:/malmen-gpt2/")
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [row["step"] for row in again.history if "meta_loss" in row] == list(range(1, 81))
    assert sorted(found.step for found in client.get_metric_history(run_id, "loss/meta")) == list(range(1, 81))
    assert_same_editor(tmp_path / "run", train_alone(config, tmp_path / "alone").editor)


def test_a_node_is_removed_with_the_lm_worker_and_an_actor_on_it(
    models: Path, uninterrupted: Editor, tmp_path: Path
) -> None:
    roles = {"lm_resources": {"lm": 1}, "hypernet_resources": {"hypernet": 1}, "hypernet_actors": 2}
    config = make_platform_config("gpt2", models, training=STEPS, cluster=roles)
    assert isinstance(config, Config)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    script = Path(__file__).parents[1] / "support" / "lose_a_node.py"
    found = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "config.json"), str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    assert len(list(tmp_path.glob("waited-*"))) == 2  # the rank on the lost node, and the one that did its work
    assert_same_editor(tmp_path / "run", uninterrupted)
