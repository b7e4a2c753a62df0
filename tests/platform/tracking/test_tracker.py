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
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Run

from malmen.config import Config, TrackingConfig
from malmen.errors import EditError
from malmen.platform.tracking.store import check_reachable
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
    """A tracker that sends only at the end."""
    return Tracker.start(Config.model_validate(settings), str(runs / name), {}, send_seconds=1000)


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
        tracker.log_artifacts(tmp_path, "folder")
        assert tracker.register(tmp_path) is None
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
    with Tracker.start(Config(), f"{runs}/long", {}, send_seconds=0.1) as tracker:
        tracker.log(1, {"meta_loss": 2.0})
        assert wait_for(lambda: run_of(client, tracker).data.metrics == {"meta_loss": 2.0}, seconds=60)


def test_metrics_that_cannot_be_sent_are_kept_and_warned_about_once(
    runs: Path, client: MlflowClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def count(uri: str) -> None:
        attempts.append(uri)
        check_reachable(uri)

    monkeypatch.setattr("malmen.platform.tracking.tracker.check_reachable", count)
    with (
        caplog.at_level(logging.WARNING, "malmen"),
        Tracker.start(Config(), f"{runs}/a", {}, send_seconds=0.1) as tracker,
    ):
        assert tracker.run_id is not None
        client.delete_run(tracker.run_id)  # as someone may in the web page
        tracker.log(1, {"meta_loss": 1.0})
        tracker.log(2, {"meta_loss": 2.0})
        assert wait_for(lambda: len(attempts) >= 3, seconds=60)
        client.restore_run(tracker.run_id)
    [warning] = caplog.records
    assert "metrics cannot be sent" in warning.getMessage()
    history = client.get_metric_history(tracker.run_id, "meta_loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0)]


def test_artifacts_that_cannot_be_written_do_not_end_a_training(
    runs: Path, client: MlflowClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plot.txt").write_text("a plot")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "plot.txt").mkdir()
    (tmp_path / "elsewhere" / "plot.txt" / "text").write_text("where a file stands already")
    with start(runs) as tracker:
        client.log_artifact(tracker.run_id, str(tmp_path / "plot.txt"), "plots")
        tracker.log_artifacts(tmp_path / "elsewhere", "plots")
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


HISTORY: list[dict[str, Any]] = [
    {"step": 1, "meta_loss": 0.5, "seconds": {"trace": 2.0}},
    {"step": 1, "scores": {"edit_success": 0.9}},
    {"step": 2, "meta_loss": 0.25, "seconds": {"trace": 1.0}},
]
SENT = {"loss/meta": [1, 2], "seconds/trace": [1, 2], "held_out/edit_success": [1]}


def log_rows(tracker: Tracker, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        tracker.log_row(row)


def sent_steps(client: MlflowClient, tracker: Tracker) -> dict[str, list[int]]:
    """The steps at which the store has each metric."""
    names = run_of(client, tracker).data.metrics
    return {name: [metric.step for metric in client.get_metric_history(tracker.run_id, name)] for name in names}


@pytest.mark.parametrize("known", range(4))
def test_a_resumed_run_sends_the_rows_of_its_history_that_the_store_lacks(
    known: int, runs: Path, client: MlflowClient
) -> None:
    """The driver is killed after some rows were sent; the next one has all of them in the history."""
    with start(runs) as killed:
        log_rows(killed, HISTORY[:known])
    with Tracker.start(Config(), f"{runs}/a", {}, run_id=killed.run_id) as tracker:
        log_rows(tracker, HISTORY)
    assert sent_steps(client, tracker) == SENT


def test_a_store_that_is_away_when_a_run_is_resumed_gets_each_row_once_it_is_back(
    runs: Path, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    with start(runs) as killed:
        log_rows(killed, HISTORY[:1])
    with Tracker.start(Config(), f"{runs}/a", {}, run_id=killed.run_id, send_seconds=0.1) as tracker:
        back, tracker.uri = tracker.uri, "http://127.0.0.1:1"  # where nobody answers
        log_rows(tracker, HISTORY[:2])
        assert wait_for(lambda: "cannot be sent" in caplog.text, seconds=60)
        log_rows(tracker, HISTORY[2:])
        tracker.uri = back
    assert sent_steps(client, tracker) == SENT


def test_a_row_has_the_time_at_which_it_came_not_that_of_sending(
    monkeypatch: pytest.MonkeyPatch, runs: Path, client: MlflowClient
) -> None:
    clock = iter(range(1000, 2000))
    with Tracker.start(Config(), f"{runs}/stamped", {}, send_seconds=600) as tracker:
        monkeypatch.setattr("malmen.platform.tracking.tracker.time.time", lambda: next(clock))
        for step in (1, 2, 3):
            tracker.log_row({"step": step, "meta_loss": 1.0})
        monkeypatch.undo()
    sent = client.get_metric_history(str(tracker.run_id), "loss/meta")
    assert [(metric.step, metric.timestamp) for metric in sent] == [(1, 1_000_000), (2, 1_001_000), (3, 1_002_000)]


def test_rows_are_sent_while_the_history_grows(runs: Path, client: MlflowClient) -> None:
    with Tracker.start(Config(), f"{runs}/growing", {}, send_seconds=0.1) as tracker:
        for row in HISTORY:
            tracker.log_row(row)
            assert wait_for(lambda: not tracker.unsent, seconds=60)
    assert sent_steps(client, tracker) == SENT


def test_a_row_is_sent_by_one_call(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    """A driver that is killed between two calls leaves no half of a row, unless one call cannot hold the row."""
    calls: list[list[int]] = []

    def log_batch(_client: MlflowClient, _run_id: str, metrics: list[Metric], **_options: object) -> None:
        calls.append([metric.step for metric in metrics])

    with start(runs) as tracker:
        monkeypatch.setattr("malmen.platform.tracking.tracker.METRICS_PER_CALL", 5)
        monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
        for step, number in ((1, 2), (2, 2), (3, 2), (4, 7), (5, 1)):
            tracker.log(step, {f"metric{index}": float(index) for index in range(number)})
    assert calls == [[1, 1, 2, 2], [3, 3], [4, 4, 4, 4, 4], [4, 4], [5]]


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
from malmen.platform.tracking.store import check_reachable
from malmen.platform.tracking.tracker import Tracker
tracker = Tracker.start(Config(), sys.argv[1], {}, send_seconds=0.1)
tracker.log(1, {"meta_loss": 1.0})
while tracker.unsent:
    time.sleep(0.1)
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
def test_a_run_whose_store_is_away_at_the_end_is_ended_by_the_watcher(
    runs: Path, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    with start(runs) as tracker:
        tracker.log(1, {"meta_loss": 1.0})
        tracker.uri = "http://127.0.0.1:1"  # where nobody answers; the watcher knows the real one
    assert "could not be ended as FINISHED in http://127.0.0.1:1; 1 rows were not sent" in caplog.text
    assert wait_for(lambda: run_of(client, tracker).info.status == "FINISHED", seconds=300)


@pytest.mark.slow  # another interpreter imports mlflow
@pytest.mark.timeout(600)
def test_the_watcher_of_a_dead_driver_leaves_the_resumed_run_alone(runs: Path, client: MlflowClient) -> None:
    dead = start(runs)
    with Tracker.start(Config(), f"{runs}/a", {}, run_id=dead.run_id) as resumed:
        assert dead._watcher.stdin is not None
        dead._watcher.stdin.close()  # as the end of its process would
        assert wait_for(lambda: not watchers(dead), seconds=300)
        assert run_of(client, resumed).info.status == "RUNNING"


def test_the_watcher_imports_nothing_heavy_while_it_waits() -> None:
    heavy = "{'mlflow', 'torch', 'pydantic'}"
    code = f"import sys, malmen.platform.tracking.watcher; print(*sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
