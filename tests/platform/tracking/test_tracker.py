from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from malmen.config import Config, TrackingConfig
from malmen.errors import EditError
from malmen.platform.tracking.tracker import Tracker, tracking_uri

pytestmark = pytest.mark.slow  # MLflow makes its tables


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all: making its tables takes seconds."""
    return tmp_path_factory.mktemp("some runs")


@pytest.fixture(autouse=True)
def _no_store_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)


@pytest.fixture
def client(runs: Path) -> MlflowClient:
    uri = f"sqlite:///{runs}/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def start(runs: Path, name: str = "a", **settings: object) -> Tracker:
    """A tracker that sends only when told."""
    return Tracker.start(Config.model_validate(settings), str(runs / name), {}, flush_seconds=1000)


def run_of(client: MlflowClient, tracker: Tracker) -> Run:
    assert tracker.run_id is not None
    return client.get_run(tracker.run_id)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def test_the_store_is_configured_or_in_the_environment_or_beside_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    beside = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert tracking_uri(TrackingConfig(), "runs/train") == beside
    assert tracking_uri(TrackingConfig(), f"file://{tmp_path}/runs/train") == beside
    assert tracking_uri(TrackingConfig(), "s3://bucket/runs/train") == beside
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    assert tracking_uri(TrackingConfig(), "runs/train") == "http://there"
    assert tracking_uri(TrackingConfig(uri="http://here"), "runs/train") == "http://here"


def test_a_tracker_that_is_switched_off_does_nothing(tmp_path: Path) -> None:
    with start(tmp_path, tracking={"enabled": False}) as tracker:
        tracker.log(1, {"meta_loss": 1.0})
        tracker.flush()
        tracker.log_text("text", "note.txt")
        tracker.log_artifacts(tmp_path, "folder")
        assert tracker.register(tmp_path, "fingerprint", {}, "card") is None
        assert tracker.run_id is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # makes the tables
def test_a_run_carries_its_config_and_the_versions_it_was_made_with(runs: Path, client: MlflowClient) -> None:
    config = Config.model_validate({"training": {"steps": 7}, "editor": {"layers": ["x" * 7000]}})
    with Tracker.start(config, f"{runs}/named", {"sweep": "s1"}, parent="0123") as tracker:
        run = run_of(client, tracker)
        assert run.info.status == "RUNNING"
    assert run.info.run_name == "named"
    assert run.data.params["training.steps"] == "7"
    assert run.data.params["model.name"] == "builtin"
    assert len(run.data.params["editor.layers"]) == 6000
    assert run.data.tags["sweep"] == "s1"
    assert run.data.tags["mlflow.parentRunId"] == "0123"
    assert {"version.malmen", "version.torch", "version.mlflow", "version.python"} <= run.data.tags.keys()
    [artifact] = runs.glob("mlartifacts/*/artifacts/config.json")
    assert Config.model_validate(json.loads(artifact.read_text())) == config


def test_metrics_of_any_number_and_name_arrive_without_nan_and_none(runs: Path, client: MlflowClient) -> None:
    with start(runs) as tracker:
        for step in (1, 2):
            tracker.log(step, {"meta_loss": step / 10, "nothing": None, "nan": float("nan"), "lr[h.0]": 1e-6})
        tracker.log(3, {f"damping/{layer}": layer for layer in range(1100)})
    run = run_of(client, tracker)
    assert len(run.data.metrics) == 1102
    assert run.data.metrics["lr_h.0_"] == 1e-6
    assert run.data.metrics["damping/1099"] == 1099
    history = client.get_metric_history(run.info.run_id, "meta_loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2)]


def test_metrics_arrive_while_a_long_step_is_still_running(runs: Path, client: MlflowClient) -> None:
    with Tracker.start(Config(), f"{runs}/long", {}, flush_seconds=0.1) as tracker:
        tracker.log(1, {"meta_loss": 2.0})
        assert wait_for(lambda: run_of(client, tracker).data.metrics == {"meta_loss": 2.0}, seconds=60)


def test_metrics_that_cannot_be_sent_are_kept_and_warned_about_once(
    runs: Path, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    with start(runs) as tracker, caplog.at_level(logging.WARNING, "malmen"):
        assert tracker.run_id is not None
        client.delete_run(tracker.run_id)  # as someone may in the web page
        for step in (1, 2):
            tracker.log(step, {"meta_loss": float(step)})
            tracker.flush()
        client.restore_run(tracker.run_id)
    [warning] = caplog.records
    assert "metrics cannot be sent" in warning.getMessage()
    assert len(client.get_metric_history(tracker.run_id, "meta_loss")) == 2


def test_artifacts_that_cannot_be_written_do_not_end_a_training(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plot.txt").write_text("a plot")
    with start(runs) as tracker:
        tracker.log_artifacts(tmp_path, "plots")
        tracker.log_text("once more", "plots")  # a folder of that name stands there
    [path] = runs.glob(f"mlartifacts/{tracker.run_id}/artifacts/plots/*")
    assert path.read_text() == "a plot"
    assert "plots could not be written" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_the_end_of_the_block_is_the_status_of_the_run(
    error: type[BaseException] | None, status: str, runs: Path, client: MlflowClient
) -> None:
    try:
        with start(runs) as tracker:
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    tracker.finish("FINISHED")  # the first status stands
    assert run_of(client, tracker).info.status == status
    assert wait_for(lambda: not watchers(tracker), seconds=60)


def test_a_resumed_run_goes_on_and_its_changed_settings_are_tags(runs: Path, client: MlflowClient) -> None:
    with start(runs, training={"steps": 5}) as first:
        first.log(5, {"meta_loss": 1.0})
    config = Config.model_validate({"training": {"steps": 9}})
    with Tracker.start(config, f"{runs}/a", {}, run_id=first.run_id) as second:
        assert run_of(client, second).info.status == "RUNNING"
        second.log(9, {"meta_loss": 0.5})
    assert second.run_id == first.run_id
    run = run_of(client, second)
    assert (run.data.params["training.steps"], run.data.tags["resumed.training.steps"]) == ("5", "9")
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "meta_loss")] == [5, 9]


def test_what_the_store_has_of_a_run_that_goes_on_is_not_sent_again(runs: Path, client: MlflowClient) -> None:
    """Step 2 goes with a killed driver; the run goes on from step 1 and tells of all."""
    with start(runs) as killed:
        killed.log(1, {"loss/meta": 0.5, "seconds/trace": 2.0})
    with Tracker.start(Config(), f"{runs}/a", {}, run_id=killed.run_id) as tracker:
        tracker.remember(["loss/meta", "held_out/edit_success"])
        for step in (1, 2):
            tracker.log(step, {"loss/meta": 0.5, "seconds/trace": 2.0, "held_out/edit_success": None})
        tracker.log(1, {"held_out/edit_success": 0.9})
    for name, steps in {"loss/meta": [1, 2], "seconds/trace": [1, 2], "held_out/edit_success": [1]}.items():
        assert [found.step for found in client.get_metric_history(tracker.run_id, name)] == steps, name


def test_a_store_that_does_not_say_what_it_has_is_sent_what_is_new(
    runs: Path, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    with start(runs) as tracker:
        there, tracker.uri = tracker.uri, "http://127.0.0.1:1"  # where nobody answers
        tracker.remember(["loss/meta"], otherwise=range(3))
        tracker.uri = there
        for step in (1, 2, 3):
            tracker.log(step, {"loss/meta": 0.5})
    assert "could not be read" in caplog.text
    assert [found.step for found in client.get_metric_history(tracker.run_id, "loss/meta")] == [3]


def test_what_is_logged_at_once_is_sent_at_once(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    """A driver that is killed between two calls leaves no half of a row."""
    with start(runs) as tracker:
        monkeypatch.setattr("malmen.platform.tracking.tracker.METRICS_PER_CALL", 5)
        for step, number in ((1, 2), (2, 2), (3, 2), (4, 7)):
            tracker.log(step, {f"metric{index}": float(index) for index in range(number)})
        calls = [[step for *_, step in tracker._take()] for _ in range(5)]
    assert calls == [[1, 1, 2, 2], [3, 3], [4, 4, 4, 4, 4], [4, 4], []]


def test_of_too_many_metrics_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    with start(runs) as tracker:
        monkeypatch.setattr("malmen.platform.tracking.tracker.MOST_PENDING", 5)
        for step in range(4):
            tracker.log(step, {"one": 1.0, "two": 2.0})
        assert [step for *_, step in tracker._take()] == [2, 2, 3, 3]


def test_a_run_that_was_deleted_or_never_was_is_begun_anew(runs: Path, client: MlflowClient) -> None:
    with start(runs) as gone:
        assert gone.run_id is not None
    client.delete_run(gone.run_id)
    for run_id in (gone.run_id, "f" * 32):
        with Tracker.start(Config(), f"{runs}/a", {}, run_id=run_id) as tracker:
            assert tracker.run_id not in (None, run_id)


def test_two_trackers_in_one_process_do_not_mix(runs: Path, client: MlflowClient) -> None:
    with start(runs, "one") as one, start(runs, "two", tracking={"experiment": "other"}) as two:
        one.log(1, {"first": 1.0})
        two.log(1, {"second": 2.0})
    assert run_of(client, one).data.metrics == {"first": 1.0}
    assert run_of(client, two).data.metrics == {"second": 2.0}
    assert run_of(client, one).info.experiment_id != run_of(client, two).info.experiment_id


def test_a_deleted_experiment_is_named(runs: Path, client: MlflowClient) -> None:
    client.delete_experiment(client.create_experiment("thrown away"))
    with pytest.raises(EditError, match="'thrown away' is deleted"):
        start(runs, tracking={"experiment": "thrown away"})


def test_a_store_that_cannot_be_reached_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    uri = f"sqlite:///{tmp_path}/file/mlflow.db"
    with pytest.raises(EditError, match=r"file/mlflow\.db.*tracking\.uri.*tracking\.enabled=false"):
        start(tmp_path, tracking={"uri": uri})


# --- the watcher: see platform/tracking/watcher.py ------------------------------------------------------------

DRIVER = """
import sys, time
from malmen.config import Config
from malmen.platform.tracking.tracker import Tracker
tracker = Tracker.start(Config(), sys.argv[1], {}, flush_seconds=0.1)
tracker.log(1, {"meta_loss": 1.0})
tracker.flush()
print(tracker.run_id, flush=True)
time.sleep(600)
"""


def watchers(tracker: Tracker) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"malmen.platform.tracking.watcher", tracker.driver} <= set(process.info["cmdline"] or ())
    ]


def test_a_watcher_descends_from_nobody_and_outlives_a_sigterm(runs: Path, client: MlflowClient) -> None:
    """`ray job stop` sends SIGTERM, then SIGKILL, to all that descend from a driver."""
    with start(runs) as tracker:
        family = psutil.Process().children
        assert wait_for(lambda: not set(watchers(tracker)) & set(family(recursive=True)), seconds=60)
        (watcher,) = watchers(tracker)
        watcher.terminate()
        assert run_of(client, tracker).info.status == "RUNNING"
        assert watcher.is_running() and watcher.status() != psutil.STATUS_ZOMBIE
    assert wait_for(lambda: not watchers(tracker), seconds=60)


@pytest.mark.slow  # three interpreters import mlflow
@pytest.mark.timeout(600)
def test_a_killed_driver_leaves_no_running_run(runs: Path, client: MlflowClient) -> None:
    command = [sys.executable, "-c", DRIVER, f"{runs}/killed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        assert driver.stdout is not None
        run_id = driver.stdout.readline().strip()
        assert client.get_run(run_id).info.status == "RUNNING"
        os.killpg(driver.pid, signal.SIGKILL)  # the whole group, as a terminal or Ray would
    assert wait_for(lambda: client.get_run(run_id).info.status == "KILLED", seconds=300)
    assert client.get_run(run_id).data.metrics == {"meta_loss": 1.0}


@pytest.mark.slow  # another interpreter imports mlflow
@pytest.mark.timeout(600)
def test_the_watcher_of_a_dead_driver_leaves_the_resumed_run_alone(runs: Path, client: MlflowClient) -> None:
    dead = start(runs)
    with Tracker.start(Config(), f"{runs}/a", {}, run_id=dead.run_id) as resumed:
        assert dead._watcher is not None and dead._watcher.stdin is not None
        dead._watcher.stdin.close()  # as the end of its process would
        assert wait_for(lambda: not watchers(dead), seconds=300)
        assert run_of(client, resumed).info.status == "RUNNING"


def test_the_watcher_imports_nothing_heavy_while_it_waits() -> None:
    heavy = "{'mlflow', 'torch', 'pydantic'}"
    code = f"import sys, malmen.platform.tracking.watcher; print(*sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
