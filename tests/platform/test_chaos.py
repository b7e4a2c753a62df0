"""Whatever is killed, and whenever: the run ends in the editor of an uninterrupted one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from chaos import dying_actor, dying_loop
from platform_runs import make_platform_config
from torch.testing import assert_close

from malmen.checkpoint import load_editor
from malmen.config import Config
from malmen.editor import Editor
from malmen.platform.train import Listener, train
from malmen.training import train as train_alone

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = {"steps": 8, "checkpoint_every": 3}


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
    config = make_platform_config("gpt2", models, training=STEPS, cluster={"hypernet_actors": 2, "max_failures": 12})
    lost: list[str] = []
    found = train(config, tmp_path / "run", listener=Listener(event=lost.append))
    assert {path.name for path in tmp_path.glob("actor*")} == {f"actor{step}" for step in deaths}
    assert len(lost) >= len(deaths) - 1  # a death while nobody waits for the actor is seen one call later
    assert [row["step"] for row in found.history if "meta_loss" in row] == list(range(1, 9))
    assert_same_editor(found.checkpoint, uninterrupted)


@pytest.mark.usefixtures("ray_cluster")
def test_lm_ranks_and_the_only_actor_are_killed(
    models: Path, uninterrupted: Editor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a peer to copy from, the actor goes back to the last checkpoint; the ranks have no state to lose."""
    monkeypatch.setattr(
        "malmen.platform.hypernet_group.HypernetActor", dying_actor({5: ("backward", "before")}, tmp_path)
    )
    monkeypatch.setattr("malmen.platform.train.train_loop", dying_loop({3: "meta_backward"}, tmp_path))
    config = make_platform_config("gpt2", models, training=STEPS, cluster={"lm_workers": 2})
    found = train(config, tmp_path / "run")
    assert {path.name for path in tmp_path.glob("*[0-9]*")} == {"actor5", "lm3meta_backward"}
    assert_same_editor(found.checkpoint, uninterrupted)


def _actors(driver: int) -> list[psutil.Process]:
    """The Ray workers below a driver; Ray's own agents, which take a minute to notice, are not ours."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if (
                process.cmdline()[:1]
                and process.cmdline()[0].startswith("ray::")
                and "Agent" not in process.cmdline()[0]
            ):
                found.append(process)
    return found


def _is_there(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} was not there within {seconds} s"
        time.sleep(0.1)  # between two looks; the condition decides


def test_a_killed_driver_leaves_nothing_behind_and_the_same_command_goes_on(
    models: Path, uninterrupted: Editor, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    config = make_platform_config("gpt2", models, training=STEPS, tracking={"enabled": True})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    command = [sys.executable, "-m", "malmen.platform.train", "config.yaml", "--out", "run", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    driver = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    history = tmp_path / "run" / "history.jsonl"
    try:
        _wait_until(lambda: history.exists() and len(history.read_text().splitlines()) >= 4, "step 4", 150)
        actors = _actors(driver.pid)
        assert len(actors) >= 2
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait(30)
    _wait_until(lambda: not any(map(_is_there, actors)), "the end of all actors")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["facts"]["mlflow_run"]
    _wait_until(lambda: client.get_run(run_id).info.status == "KILLED", "the end of the MLflow run")

    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert "going on from step 3" in again.stderr or "going on from step 6" in again.stderr
    result = json.loads(again.stdout)
    assert (result["steps"], result["tracking_run"]) == (8, run_id)
    assert result["registered"].startswith("models:/malmen-gpt2/")
    assert client.get_run(run_id).info.status == "FINISHED"
    assert_same_editor(tmp_path / "run", uninterrupted)


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
    assert_same_editor(tmp_path / "run", uninterrupted)
