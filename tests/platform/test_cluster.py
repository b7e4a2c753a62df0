"""Clusters that cannot be reached or cannot hold a run: one clear message each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from small_runs import SMALL

from malmen.config import ClusterConfig, ModelConfig
from malmen.errors import EditError, UsageError
from malmen.platform.cluster import (
    Roles,
    _check_answers,
    check_room,
    describe_resources,
    on_given_gpu,
    on_own_device,
    room_for_runs,
    share_gpus,
    size_roles,
)  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


def _train(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "malmen.platform.train", "builtin", *SMALL, "tracking.enabled=false", *args]
    clean = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    return subprocess.run(
        command, env=clean | environment, cwd=folder, capture_output=True, text=True, timeout=120
    )  # fmt: skip


def test_an_address_where_nothing_answers_is_said_at_once() -> None:
    with pytest.raises(EditError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        _check_answers("127.0.0.1:1")


def test_an_address_without_a_port_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        _check_answers("somewhere")


@pytest.mark.slow
def test_a_wrong_address_on_the_command_line_is_one_message(tmp_path: Path) -> None:
    found = _train(tmp_path, "--address", "127.0.0.1:1", "--out", "run")
    assert (found.returncode, "Traceback" in found.stderr) == (1, False), found.stderr
    assert "no Ray cluster answers at '127.0.0.1:1'" in found.stderr
    assert not (tmp_path / "run").exists()


def test_a_relative_folder_in_a_ray_job_is_wrong_usage(malmen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    code, _, err = malmen("train", "builtin", *SMALL, "--out", "run")
    assert (code, "give an absolute path" in err) == (2, True), err


def test_a_ray_job_that_keeps_its_run_elsewhere_says_where_mlflow_is(
    malmen: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code, _, err = malmen("train", "builtin", "--out", "s3://bucket/run")
    assert code == 2 and "give tracking.uri" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_client_without_the_token_is_told_what_to_set(tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    fewer_tries = {"RAY_NUM_REDIS_GET_RETRIES": "2"}  # one a second
    found = _train(tmp_path, "--address", address, "--out", "run", HOME=str(tmp_path / "home"), **fewer_tries)
    assert (found.returncode, "Traceback" in found.stderr) == (1, False), found.stderr
    assert "RAY_AUTH_MODE=token" in found.stderr


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_that_is_too_small_names_what_is_missing() -> None:
    config = ClusterConfig(lm_cpus=100, hypernet_resources={"moon": 1}, wait_seconds=1)
    with pytest.raises(EditError, match=r"missing 93 CPU, 1 moon\. Needed are 1 LM workers of 100 CPU"):
        check_room(config, size_roles(config, ModelConfig(), own=False))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_that_is_too_small_ends_the_command_and_leaves_nothing(malmen: Run, tmp_path: Path) -> None:
    too_much = ["cluster.lm_cpus=100", "cluster.wait_seconds=1"]
    code, _, err = malmen("train", "builtin", *SMALL, *too_much, "--out", tmp_path / "run")
    assert (code, "Traceback" in err) == (1, False) and "missing 93 CPU" in " ".join(err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_with_room_is_left_as_it_was() -> None:
    config = ClusterConfig(lm_workers=2, hypernet_actors=3, wait_seconds=30)
    roles = size_roles(config, ModelConfig(), own=False)
    assert (roles.lm, roles.hypernet) == ({"CPU": 1.0}, {"CPU": 1.0})
    check_room(config, roles)
    check_room(config, roles)  # a leak would leave no room for the second


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("wanted", "own", "gpus", "overlap"),
    [
        (None, True, 0, False),
        (None, True, 1, True),
        (None, False, 0, True),
        (True, True, 0, True),
        (False, False, 1, False),
    ],
)
def test_roles_overlap_unless_they_share_one_machines_cores(
    wanted: bool | None, own: bool, gpus: float, overlap: bool
) -> None:
    assert size_roles(ClusterConfig(overlap=wanted, lm_gpus=gpus), ModelConfig(), own=own).overlap is overlap


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("role", [{"lm_workers": 2, "lm_gpus": 0.5}, {"hypernet_actors": 2, "hypernet_gpus": 0.5}])
def test_processes_that_talk_to_each_other_do_not_share_a_gpu(role: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"_gpus=0\.5 for 2 processes: NCCL needs a whole GPU"):
        size_roles(ClusterConfig(**role), ModelConfig(), own=False)


@pytest.mark.parametrize(
    ("device", "gpus", "used"),
    [
        ("auto", [], "cpu"), ("auto", ["1"], "auto"), ("cuda", [], "cuda"), ("split", ["0", "1"], "split"),
        ("cuda:1", ["0"], "cuda"), ("cuda:1", [], "cuda:1"), ("cpu", ["0"], "cpu"),
    ],
)  # fmt: skip
def test_a_gpu_that_ray_has_not_given_is_anothers(device: str, gpus: list[str], used: str) -> None:
    assert on_own_device(ModelConfig(device=device), gpus).device == used


@pytest.mark.parametrize(("gpus", "used"), [([], "cpu"), (["3"], None)])
@pytest.mark.parametrize("device", ["auto", "cuda", "split", "cpu"])
def test_an_actor_without_a_gpu_is_on_the_cpu_wherever_the_model_is(
    device: str, gpus: list[str], used: str | None
) -> None:
    assert on_given_gpu(ModelConfig(device=device), gpus).device == (used or device)


def test_an_actor_is_on_the_gpu_that_ray_gave_it_and_not_on_the_one_of_that_number() -> None:
    assert on_given_gpu(ModelConfig(device="cuda:1"), ["0"]).device == "cuda"


@pytest.mark.parametrize(
    ("device", "gpus", "asked", "given"),
    [
        ("auto", 4, {}, (1, 1)),
        ("auto", 2, {}, (1, 0)),
        ("cuda", 2, {}, (1, 0)),
        ("auto", 1, {"lm_workers": 1, "hypernet_actors": 1}, (0.5, 0.5)),  # the paper's own setting
        ("auto", 1, {"lm_workers": 1, "hypernet_actors": 1, "hypernet_gpus": 0}, (1, 0)),
        ("auto", 1, {"lm_workers": 1}, (1, 0)),
        ("auto", 1, {"lm_gpus": 0}, (0, 0)),
        ("auto", 0, {"lm_gpus": 1, "hypernet_gpus": 1}, (1, 1)),  # an autoscaler is to add them
        ("cpu", 4, {}, (0, 0)),
        ("cpu", 4, {"lm_gpus": 1, "hypernet_gpus": 1}, (0, 0)),
    ],
)
def test_gpus_go_to_the_language_model_first_and_to_nobody_on_the_cpu(
    device: str, gpus: float, asked: dict[str, float], given: tuple[float, float]
) -> None:
    config = ClusterConfig.model_validate({"lm_workers": 2, "hypernet_actors": 2, **asked})
    assert share_gpus(config, ModelConfig(device=device), gpus) == given


def test_more_lm_workers_than_gpus_are_not_put_on_the_cpu_unasked() -> None:
    config = ClusterConfig(lm_workers=9)
    with pytest.raises(UsageError, match=r"lm_workers=9, but the cluster has 8 GPUs: .*lm_gpus=0 for the CPU"):
        share_gpus(config, ModelConfig(), 8)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_on_the_cpu_asks_for_no_gpu() -> None:
    roles = size_roles(ClusterConfig(lm_gpus=1, hypernet_gpus=1), ModelConfig(device="cpu"), own=True)
    assert (roles.lm, roles.hypernet, roles.overlap) == ({"CPU": 1.0}, {"CPU": 1.0}, False)


@pytest.mark.parametrize(
    ("nodes", "free", "runs"),
    [
        ([{"CPU": 8}], {"CPU": 8}, 2),
        ([{"CPU": 8}], {"CPU": 5}, 1),  # others work there too
        ([{"CPU": 4}, {"CPU": 4}, {"CPU": 4}], {"CPU": 12}, 3),
        ([{"CPU": 2}] * 6, {"CPU": 12}, 1),  # twelve in all, but no node has three
        ([{"CPU": 1}], {"CPU": 1}, 1),  # one is tried all the same, and says what is missing
    ],
)
def test_runs_at_the_same_time_are_as_many_as_the_nodes_can_hold(
    nodes: list[dict[str, float]], free: dict[str, float], runs: int
) -> None:
    roles = Roles({"CPU": 3}, {"CPU": 1}, 1, 1, overlap=True)
    assert room_for_runs(ClusterConfig(), roles, nodes, free) == runs


def test_resources_are_shown_without_rays_own() -> None:
    found = {"CPU": 2.0, "node:1.2.3.4": 1.0, "memory": 1e9, "object_store_memory": 1e9, "GPU": 0.0, "lm": 1.5}
    assert describe_resources(found) == "2 CPU, 1.5 lm"
    assert describe_resources({}) == "nothing"
