"""What each role computes on, with which memory and at which rate: by config, by card and by cluster file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_documents import BOTH_ENTRYPOINTS, CLUSTER, ENTRYPOINTS, node_types, ray_container, settings, worker_groups

from malmen.config import Config, load_config
from malmen.errors import UsageError
from malmen.lm.cards import find_card
from malmen.platform.plan.devices import find_devices, planned_dtype
from malmen.platform.plan.memory import GB
from malmen.platform.plan.planner import Plan, Planner, PlanOptions
from malmen.platform.plan.timing import find_rates

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "platform" / "configs"


def _config(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "devices", "dtype"),
    [
        ([], ("cpu", "cpu"), torch.float32),
        (["model.device=cuda"], ("cuda", "cuda"), torch.bfloat16),
        (["cluster.lm_gpus=1", "cluster.hypernet_gpus=0"], ("cuda", "cpu"), torch.bfloat16),
        (["model.device=cpu", "cluster.lm_gpus=1", "model.dtype=float64"], ("cpu", "cpu"), torch.float64),
    ],
)
def test_gpus_are_planned_where_the_config_asks_for_them(
    overrides: list[str], devices: tuple[str, str], dtype: torch.dtype
) -> None:
    config = _config("builtin", *overrides)
    found = find_devices(config)
    assert ((found.lm.kind, found.hypernet.kind), planned_dtype(config, found.lm)) == (devices, dtype)


# --- cards ---


def test_roles_on_different_devices_have_rates_of_their_own() -> None:
    found = find_devices(_config("builtin", "cluster.lm_gpus=1", "cluster.hypernet_gpus=1"), "A10G", "H100")
    lm, hypernet = (find_rates(device, torch.float32, None, False) for device in (found.lm, found.hypernet))
    assert (lm.products[torch.float64], hypernet.products[torch.float64]) == (0.5 * 0.49e12, 0.5 * 67e12)
    assert (lm.memory, hypernet.memory) == (300e9, 1675e9)
    mixed = find_devices(_config("builtin", "cluster.lm_gpus=1", "cluster.hypernet_gpus=0"), "T4")
    assert (mixed.lm.kind, mixed.hypernet.kind, mixed.hypernet.card) == ("cuda", "cpu", None)


@pytest.mark.parametrize(
    ("card", "dtype"), [("A10G", torch.bfloat16), ("T4", torch.float32), ("V100-32", torch.float32)]
)
def test_a_card_without_bfloat16_is_planned_in_float32(card: str, dtype: torch.dtype) -> None:
    config = _config("builtin", "cluster.lm_gpus=1")
    assert planned_dtype(config, find_devices(config, card).lm) == dtype


@pytest.mark.parametrize(("card", "rate"), [("A100-80", 156e12), ("T4", 8.1e12)])  # a T4 has none
def test_tf32_is_the_actors_rate_where_it_is_asked_for_and_the_card_has_it(card: str, rate: float) -> None:
    asked = ("cluster.lm_gpus=1", "cluster.hypernet_gpus=1", "editor.tf32=true")
    found = find_devices(_config("builtin", *asked), card)
    assert find_rates(found.hypernet, torch.float32, None, False).products[torch.float32] == rate / 2
    assert find_rates(found.lm, torch.float32, None, False).products[torch.float32] < 10e12


def test_an_unknown_card_is_refused_by_name_and_guessed_if_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("builtin", "cluster.lm_gpus=1")
    with pytest.raises(UsageError, match="no card 'X9' in the table: expected one of V100-16"):
        find_devices(config, "X9")
    assert find_devices(config).lm.name == "A100-80 (assumed)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X9")
    memory = type("Properties", (), {"total_memory": 20 * GB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    device = find_devices(config).lm
    assert device.card is not None and device.card.memory == 20
    assert device.name == "NVIDIA X9 (not in the table: rates of A100-80)"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    assert find_devices(config).lm.name == "L4"


# --- the shipped cluster files ---


def _memory_of(name: str, node: str) -> float:
    """GB of a node: the pod's limit; on EC2 what stands behind the type of instance."""
    if name == "rayjob":
        (group,) = (group for group in worker_groups(name) if group["groupName"] == node)
        return float(ray_container(group)["resources"]["limits"]["memory"].removesuffix("Gi"))
    instance = CLUSTER["available_node_types"][node]["node_config"]["InstanceType"]
    stated = re.search(rf"InstanceType: {instance}  # \d+ vCPU, (\d+) GB", (ROOT / "cluster.yaml").read_text("utf-8"))
    assert stated is not None
    return float(stated[1])


@pytest.fixture(scope="module", params=list(ENTRYPOINTS))
def shipped(request: Any) -> tuple[str, Plan]:
    """A cluster file, planned with the numbers that it states. Facts are given: the data are on that cluster."""
    name = request.param
    lm, hypernet = (_memory_of(name, node) for node in ("lm", "hypernet"))
    options = PlanOptions(fact_tokens=14, answer_tokens=3, lm_card="A10G", lm_host_memory=lm, hypernet_memory=hypernet)
    config = settings(ENTRYPOINTS[name])
    config = config.model_copy(update={"model": config.model.model_copy(update={"name": "EleutherAI/gpt-j-6b"})})
    return name, Planner(options).plan(config)


@pytest.mark.slow  # rehearses steps of GPT-J
def test_a_shipped_cluster_is_planned_with_the_cores_cards_and_memory_that_its_file_states(
    shipped: tuple[str, Plan],
) -> None:
    name, plan = shipped
    cluster, nodes = settings(ENTRYPOINTS[name]).cluster, node_types(name)
    assert not plan.devices.here and plan.machine is None  # whatever this machine has
    assert plan.devices.lm.card == find_card("A10G") and plan.lm.device == "cuda"
    assert (plan.lm.processes, nodes["lm"][1]["GPU"]) == (nodes["lm"][0], cluster.lm_gpus)
    assert plan.devices.hypernet.threads == cluster.hypernet_cpus <= nodes["hypernet"][1]["CPU"]
    assert (plan.hypernet.processes, plan.hypernet.device) == (nodes["hypernet"][0], "cpu")
    assert plan.lm.limit == round(22.0 * GB)
    assert (plan.lm.host_limit, plan.hypernet.limit) == tuple(
        round(_memory_of(name, node) * GB) for node in ("lm", "hypernet")
    )


@pytest.mark.slow
def test_a_shipped_cluster_is_large_enough(shipped: tuple[str, Plan]) -> None:
    name, plan = shipped
    assert plan.fits and plan.lm.in_node > 0
    text = (ROOT / {"cluster": "cluster.yaml", "rayjob": "platform/kuberay/rayjob.yaml"}[name]).read_text("utf-8")
    (stated,) = re.findall(r"`malmen plan`[^\d]*([\d.]+) GB", text)
    assert f"{plan.lm.total / GB:.1f}" == stated


@pytest.mark.slow
@BOTH_ENTRYPOINTS
def test_on_another_cluster_unknown_memory_is_said_to_be_unknown(name: str) -> None:
    config = settings(ENTRYPOINTS[name]).model_copy(update={"model": _config("builtin").model})
    plan = Planner(PlanOptions(fact_tokens=14, answer_tokens=3)).plan(config)
    assert plan.hypernet.limit is None and plan.lm.host_limit is None
    assert [line for line in plan.assumptions if "give --" in line] == [
        "the memory of the nodes is unknown: give --lm-host-memory to compare it with LM workers",
        "the memory of the nodes is unknown: give --hypernet-memory to compare it with hypernet actors",
    ]


# --- the cache ---


def test_no_cache_is_planned_for_records_that_are_unknown(tmp_path: Path) -> None:
    missing = ["data.train=nowhere.jsonl", "training.num_edits=8", "editor.rank=64", "training.steps=3"]
    planner, cached = Planner(PlanOptions(fact_tokens=14, answer_tokens=3)), "cache of what recurs"
    unknown = planner.plan(_config("builtin", *missing))
    assert cached not in unknown.lm.items
    assert any(line.startswith("whether facts recur is unknown without nowhere.jsonl") for line in unknown.assumptions)
    once = planner.plan(_config("builtin", *missing, "data.format=zsre"))
    assert cached not in once.lm.items and not any("recur" in line for line in once.assumptions)
    again = planner.plan(_config("builtin", *missing, "data.format=zsre", "training.steps=40000"))
    assert again.lm.items[cached] > 0


def test_an_automatic_format_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    row = '{"prompt": "Who plays the %d?", "answer": "Karel", "unrelated": [{"prompt": "Where?", "answer": "here"}]}\n'
    file.write_text("".join(row % index for index in range(20)))
    small = [f"data.train={file}", "data.format=auto", "training.num_edits=8", "editor.rank=64"]
    once, again = (Planner().plan(_config("builtin", *small, f"training.steps={steps}")) for steps in (2, 5))
    assert "cache of what recurs" not in once.lm.items and again.lm.items["cache of what recurs"] > 0
    assert any(line.startswith(f"facts: 20 records of {file}") for line in once.assumptions)


# --- the host ---


def test_traces_pass_through_the_object_store_on_every_host() -> None:
    config = _config("builtin", "training.num_edits=64", "editor.rank=64", "cluster.overlap=true", "batch.cache_mb=0")
    planner = Planner(PlanOptions(fact_tokens=14, answer_tokens=3))
    on_gpus = config.model_copy(update={"cluster": config.cluster.model_copy(update={"lm_gpus": 1.0})})
    for plan in (planner.plan(config), planner.plan(on_gpus)):
        traces, shifts = plan.transfers.traces, plan.transfers.shifts
        assert plan.lm.store == plan.hypernet.store == 2 * traces + 2 * shifts
        for role in (plan.lm, plan.hypernet):
            held = role.host if role.device == "cuda" else role.items
            assert held["pages of Ray's object store"] == role.store
            assert role.in_node == sum(held.values())
    assert planner.plan(on_gpus).lm.host["shifts and gradients on their way"] == 2 * shifts


def test_a_host_that_is_too_small_does_not_fit() -> None:
    config = _config(
        "builtin", "training.num_edits=8", "editor.rank=64", "cluster.lm_gpus=1", "cluster.hypernet_gpus=1"
    )
    options = {"fact_tokens": 14, "answer_tokens": 3, "hypernet_host_memory": 64.0}
    assert Planner(PlanOptions(**options, lm_host_memory=64)).plan(config).fits  # type: ignore[arg-type]
    small = Planner(PlanOptions(**options, lm_host_memory=1)).plan(config)  # type: ignore[arg-type]
    assert not small.fits and small.hypernet.fits and small.lm.total < small.lm.limit  # type: ignore[operator]
