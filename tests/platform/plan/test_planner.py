from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import PLAIN

from malmen.config import Config, load_config
from malmen.errors import EditError
from malmen.platform.plan.advice import advise, change
from malmen.platform.plan.data import step_facts
from malmen.platform.plan.lm import plan_lm
from malmen.platform.plan.memory import GB, MB
from malmen.platform.plan.planner import DRIVER, Planner, PlanOptions
from malmen.platform.plan.shapes import KNOWN, find_skeleton, known_shape

pytestmark = pytest.mark.slow  # each plan rehearses a step

CONFIGS = Path(__file__).parents[3] / "platform" / "configs"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def _shared() -> Planner:
    return Planner()


@pytest.fixture
def planner(_shared: Planner) -> Planner:
    """Of facts of 12 tokens and with memory for everything; it rehearses once what several tests plan."""
    _shared.options = PlanOptions(lm_memory=1000, hypernet_memory=1000, fact_tokens=12, answer_tokens=3)
    return _shared


def _builtin(*overrides: str) -> Config:
    small = ["training.num_edits=8", "editor.rank=64", "editor.layers=last:1"]
    return load_config(CONFIGS / "builtin.yaml", [*PLAIN, *small, *overrides])


def test_a_plan_is_of_a_step_of_the_configs_size() -> None:
    config = _builtin("training.num_edits=300", "training.unrelated_per_edit=2")
    planned = plan_lm(config, torch.float32)
    found = step_facts(config, planned.lm)
    assert [len(some) for some in found.by_kind.values()] == [300, 300, 600]
    given = step_facts(config, planned.lm, fact_tokens=20, answer_tokens=5)
    assert {(fact.length, len(fact.targets)) for fact in given.edits} == {(19, 5)}


# --- what follows from it ----------------------------------------------------------------------------


def test_own_texts_are_planned_as_long_as_they_may_become() -> None:
    sizes = ("training.num_edits=300", "training.unrelated_per_edit=2", "own_text.max_tokens=7")
    lm = plan_lm(_builtin(), torch.float32).lm
    for unrelated, number, own in (("self", 600, 600), ("mixed", 1200, 600)):
        found = step_facts(_builtin(*sizes, f"data.unrelated={unrelated}"), lm)
        assert len(found.unrelated) == number
        assert sum(len(fact.targets) == 7 for fact in found.unrelated) >= own
        assert found.source.endswith("own texts of 7 tokens")


def test_near_misses_are_planned_beside_the_unrelated_facts_as_long_as_they_may_become() -> None:
    sizes = ("training.num_edits=300", "own_text.max_tokens=7", "data.near_misses=2")
    lm = plan_lm(_builtin(), torch.float32).lm
    found, plain = step_facts(_builtin(*sizes), lm), step_facts(_builtin(*sizes[:2]), lm)
    assert len(found.unrelated) == 900 and found.pools["unrelated"] > plain.pools["unrelated"]
    assert sum(len(fact.targets) == 7 for fact in found.unrelated) >= 600
    assert found.source.endswith("near misses answered in 7 tokens")


@pytest.mark.parametrize(
    ("role", "more"),
    [
        ("hypernet", "editor.rank=128"),
        ("hypernet", "training.num_edits=64"),
        ("lm", "training.num_edits=64"),
        ("lm", "editor.layers=last:2"),
        ("hypernet", "editor.layers=last:2"),
        ("hypernet", "editor.preserved_weight=1"),  # all moments of keys, and the factor of A
    ],
)
def test_more_of_it_needs_more(planner: Planner, role: str, more: str) -> None:
    small, large = planner.plan(_builtin()), planner.plan(_builtin(more))
    assert getattr(large, role).total > getattr(small, role).total
    assert large.step_seconds > small.step_seconds


def test_reading_the_keys_to_preserve_counts_where_it_is_the_most(planner: Planner) -> None:
    """One edit takes little; the sums of u uᵀ in float64 are there before the first step, whatever the edits."""
    small = ["training.num_edits=1", "editor.rank=64", "editor.layers=last:6", "batch.token_budget=64"]
    config = load_config(CONFIGS / "gpt2.yaml", [*small, "editor.preserved_weight=1"])
    items = planner.plan(config).lm.items
    assert items["moments of the keys to preserve, before the first step"] == 6 * 8 * 3072**2


def test_a_smaller_cut_needs_less(planner: Planner) -> None:
    config = _builtin("training.num_edits=64", "editor.layers=last:2")
    whole = planner.plan(config)
    cut = planner.plan(change(config, ["batch.token_budget=128", "batch.hypernet_rows=128"]))
    assert cut.lm.total < whole.lm.total and cut.hypernet.total < whole.hypernet.total
    actors = planner.plan(change(config, ["cluster.hypernet_actors=4"]))
    assert actors.hypernet.total < whole.hypernet.total
    assert actors.transfers.theta_grads > whole.transfers.theta_grads == 0
    even = planner.plan(change(config, ["cluster.hypernet_actors=2"]))
    assert actors.transfers.solve > even.transfers.solve == 0  # 2 layers over 4 actors: each layer is shared by two


def test_zero3_divides_the_weights_of_a_large_model(planner: Planner) -> None:
    config = load_config(CONFIGS / "llama-3-70b.yaml", ["editor.layers=last:1", "training.num_edits=64"])
    plan = planner.plan(config)
    weights = plan_lm(config, torch.bfloat16).weight_bytes
    items = plan.lm.items
    assert items["weights, 1/8"] == pytest.approx(weights / 8, abs=1)
    assert items["whole weights gathered at once"] < weights / 50
    assert plan.lm.device == plan.hypernet.device == "cuda" and plan.machine is None
    assert plan.transfers.weights > 7 * weights


@pytest.mark.parametrize("roles", [("hypernet",), pytest.param(("lm", "hypernet"), marks=pytest.mark.slow)])
def test_advice_fits(planner: Planner, roles: tuple[str, ...]) -> None:
    config = _builtin("training.num_edits=64", "batch.token_budget=256", "batch.hypernet_rows=256", "lm_workers=32")
    needed = planner.plan(config)
    limits = {f"{role}_memory": (getattr(needed, role).total - MB) / GB for role in roles}
    planner.options = replace(planner.options, **limits)  # type: ignore[arg-type]
    plan = planner.plan(config)
    found = advise(planner, plan)
    assert not plan.fits and found
    for advice in found:
        changed = planner.plan(change(plan.config, advice.settings))
        assert changed.fits and (changed.lm.total, changed.hypernet.total) == (advice.lm, advice.hypernet)


def test_without_limits_all_processes_must_fit_into_this_machine_together(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner.options = replace(planner.options, lm_memory=None, hypernet_memory=None)
    config = _builtin("cluster.lm_workers=2")
    plan = planner.plan(config)
    assert plan.machine is not None and plan.machine[0] == DRIVER + 2 * plan.lm.total + plan.hypernet.total
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": plan.machine[0] - 1}.__getitem__)
    small = planner.plan(config)
    assert small.lm.fits and small.hypernet.fits and not small.fits


def test_roles_that_share_a_card_have_their_parts_of_its_memory(planner: Planner) -> None:
    planner.options = replace(planner.options, lm_memory=None, hypernet_memory=None)
    plan = planner.plan(_builtin("model.device=cuda", "cluster.lm_gpus=0.5", "cluster.hypernet_gpus=0.25"))
    assert (plan.lm.limit, plan.hypernet.limit) == (round(79.1 * GB / 2), round(79.1 * GB / 4))


def test_no_advice_is_given_where_none_is_needed_or_nothing_helps(planner: Planner) -> None:
    config = _builtin("editor.layers=last:1", "batch.token_budget=64", "batch.hypernet_rows=64")
    assert advise(planner, planner.plan(config)) == []
    planner.options = replace(planner.options, hypernet_memory=0.1)
    assert advise(planner, planner.plan(config)) == []


# --- without a network -------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a plan of a known model must not need the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_has_a_known_shape(path: Path, offline: None) -> None:
    planned = plan_lm(load_config(path), torch.bfloat16)
    assert planned.layers and planned.num_parameters > 10**6


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_can_be_planned(path: Path, offline: None) -> None:
    plan = Planner().plan(load_config(path))
    assert min(plan.lm.total, plan.hypernet.total) > 100 * MB and plan.step_seconds > 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("EleutherAI/gpt-j-6b", 6_050_882_784), ("meta-llama/Meta-Llama-3-70B", 70_553_706_496)],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, parameters: int, offline: None) -> None:
    model, _, source = find_skeleton(_builtin(f"model.name={name}").model)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert "known shape" in source


def test_the_longest_name_that_matches_is_meant() -> None:
    assert known_shape("openai-community/gpt2-xl") == "gpt2-xl"
    assert known_shape("models/bert-base-fever") == "bert-base"
    assert known_shape("somebody/unheard-of") is None
    assert set(KNOWN) == {known_shape(name) for name in KNOWN}


# --- the command -------------------------------------------------------------------------------------

SMALL = ("training.num_edits=8", "editor.rank=64", "editor.layers=last:1", "--fact-tokens", 12)


def test_the_command_prints_a_plan(malmen: Run) -> None:
    code, out, _ = malmen("plan", "builtin", *SMALL, "--flops", 100)
    shown = ("LM worker on CPU", "hypernet actor on CPU", "Adam", "meta_loss", "given, 100 GFLOP/s", "It fits.")
    assert [expected for expected in shown if expected not in out] == []
    assert code == 0


def test_the_command_names_the_card_and_plans_its_host(malmen: Run) -> None:
    code, out, _ = malmen(
        "plan", "builtin", *SMALL, "cluster.lm_gpus=1", "cluster.hypernet_gpus=0", "--lm-card", "L4",
        "--lm-host-memory", 2, "--hypernet-memory", 64,
    )  # fmt: skip
    assert "LM worker on L4" in out and "LM worker on its host" in out and "hypernet actor on CPU" in out
    assert "rates: LM 50% of the data sheet of L4, " in out
    assert code == 1 and "of its host and has 2.00 GB: it does not fit" in out


def test_a_plan_that_does_not_fit_says_what_would_and_exits_with_1(malmen: Run) -> None:
    code, out, _ = malmen("plan", "builtin", *SMALL, "rank=2048", "--hypernet-memory", 0.52, "--json")
    found = json.loads(out)
    assert code == 1 and not found["fits"]
    assert "editor.rank=1024" in [one["settings"][0] for one in found["advice"]]
    moved = found["bytes_moved"]
    assert moved["objects"] == moved["traces"] + moved["shifts"] + moved["shift_grads"]
    stages = {stage["name"] for stage in found["stages"]}
    assert stages >= {"trace", "solve", "meta_loss", "hypernet", "adam", "transfer"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--flops", 1, "--measure"), "exclude each other"),
        (("model.device=cuda", "--measure"), "give --flops"),
        (("cluster.lm_gpus=1", "--lm-card", "X9"), "no card 'X9' in the table"),
        (("layers=last:9",), "K must be 1 to 6"),
        (("rnak=3",), "unknown key"),
    ],
)
def test_wrong_usage_is_told(malmen: Run, arguments: tuple[object, ...], message: str) -> None:
    code, _, err = malmen("plan", "builtin", *arguments)
    assert code == 2 and message in err


def test_an_unknown_model_names_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_config: object) -> None:
        raise EditError("cannot load the model")

    monkeypatch.setattr("malmen.platform.plan.shapes.load_skeleton", unreachable)
    with pytest.raises(EditError, match=r"known without it are those of gpt2, "):
        find_skeleton(_builtin("model.name=somebody/unheard-of").model)
