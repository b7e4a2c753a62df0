"""RLEdit: gradients through a trajectory of edits, compared with autograd; what is trained, and how it is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import Float64Throughout
from plain import plain_log_probs, plain_nll
from small_runs import make_config
from tiny_models import Setup, make_setup, random_facts
from torch import Tensor
from torch.testing import assert_close
from untouched import digest

from malmen.config import Config
from malmen.data.tokens import MetaBatch, one_batch
from malmen.errors import UsageError
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.lm.trace import Traces, trace
from malmen.meta import meta_step
from malmen.methods.registry import METHODS
from malmen.methods.rledit import trajectory_step
from malmen.training import train

TRAJECTORY = {"locality_coef": 0.6, "trajectory": 3, "max_grad_norm": 1e9}


def _batches(lm: LanguageModel, sizes: tuple[int, ...] = (3, 9, 2)) -> list[MetaBatch]:
    """Batches of edits with more and with fewer tokens than a key has numbers."""
    return [
        MetaBatch(random_facts(lm, size, 10 + size), random_facts(lm, 3, 20 + size), random_facts(lm, 2, 30 + size))
        for size in sizes
    ]


def _first_gradient(setup: Setup) -> dict[str, Tensor]:
    """The gradient of the one step that was taken: Adam's first mean is a tenth of it."""
    state = setup.editor.optimizer().state
    return {name: 10 * state[value]["exp_avg"] for name, value in setup.editor.named_parameters()}


def _graph_shifts(setup: Setup, traces: Traces) -> dict[str, Tensor]:
    """S* = DUᵀ(UUᵀ + λI + wC)⁻¹ by a dense solve, in the graph of θ."""
    shifts = {}
    for layer in setup.editor.layers:
        net, index = setup.editor._find(layer.name)
        keys, value_grads = traces[layer.name]
        pseudo_keys, pseudo_grads, roots = net(torch.full((len(keys),), index), keys, value_grads)
        diffs = (pseudo_keys * keys).sum(-1, keepdim=True) * pseudo_grads
        if roots is not None:
            keys, diffs = keys * roots[:, None], diffs * roots[:, None]
        gram = keys.T @ keys + net.damping()[index] * torch.eye(layer.key_size, dtype=torch.float64)
        for weight, moment in zip(net.weights(index), net.term_moments(), strict=True):
            gram = gram + weight * moment[index]
        shifts[layer.name] = torch.linalg.solve(gram, keys.T @ diffs).T
    return shifts


def _losses_of_the_trajectory(setup: Setup, batches: list[MetaBatch]) -> tuple[Tensor, Tensor]:
    """Both losses, each fact by itself on weights that are really changed, with the hyper-network in the graph."""
    lm, training = setup.lm, setup.editor.config.training
    total: dict[str, Tensor] = {}
    generalization, locality = [], []
    for newest, batch in enumerate(batches):
        before = {name: shift.detach() for name, shift in total.items()}
        with edited(lm, before):
            traces = trace(lm, setup.editor.layers, [one_batch(batch.edits, lm.pad_id)], "answer")
        if newest == 0:
            setup.editor.observe(traces)
        new = _graph_shifts(setup, traces)
        total = {name: total[name] + shift if name in total else shift for name, shift in new.items()}
        for back in range(min(newest + 1, training.trajectory_window)):
            old, factor = batches[newest - back], training.trajectory_discount**back
            asked = [plain_nll(lm, fact, total) for fact in old.equivalents]
            generalization.append(factor * torch.stack(asked).mean())
            drifts = []
            for fact in old.unrelated:
                reference, log_probs = plain_log_probs(lm, fact, before).detach(), plain_log_probs(lm, fact, total)
                drifts.append((reference.exp() * (reference - log_probs)).sum())
            locality.append(factor * torch.stack(drifts).mean())
    return torch.stack(generalization).sum(), torch.stack(locality).sum()


@pytest.mark.parametrize("budget", [30, 10_000])
@pytest.mark.parametrize(
    ("training", "editor"),
    [
        ({}, {}),
        ({"trajectory_window": 2, "trajectory_discount": 0.5}, {}),
        ({}, {"preserved_weight": 2.0, "learn_preserved_weight": True, "token_weights": "learned"}),
    ],
    ids=["plain", "a shorter window", "learned weights"],
)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_gradient_of_three_batches_is_autograds_through_everything(
    name: str, training: dict[str, Any], editor: dict[str, Any], budget: int
) -> None:
    settings: dict[str, Any] = {"training": {**TRAJECTORY, "trajectory_discount": 0.95, **training}, **editor}
    one, two = make_setup(name, budget=budget, rows=budget, **settings), make_setup(name, **settings)
    before = digest(one.lm)
    with Float64Throughout():
        report = trajectory_step(one.lm, one.editor, _batches(one.lm))
        generalization, locality = _losses_of_the_trajectory(two, _batches(two.lm))
        meta_loss = generalization + 0.6 * locality
        meta_loss.backward()  # type: ignore[no-untyped-call]
    assert report.generalization_loss == pytest.approx(float(generalization.detach()), rel=1e-8)
    assert report.locality_loss == pytest.approx(float(locality.detach()), rel=1e-8)
    assert report.meta_loss == pytest.approx(float(meta_loss.detach()), rel=1e-8)
    found = _first_gradient(one)
    assert any(grad.abs().max() > 1e-3 for grad in found.values())
    for parameter, value in two.editor.named_parameters():
        assert value.grad is not None, parameter
        scale = float(value.grad.abs().max())
        assert_close(found[parameter], value.grad, rtol=1e-7, atol=1e-7 * scale, msg=parameter)
    assert digest(one.lm) == before and one.editor.steps_done == 1


def test_a_trajectory_of_one_batch_is_malmens_step() -> None:
    one, two = (make_setup("gpt2", training=TRAJECTORY) for _ in range(2))
    (batch,) = _batches(one.lm, (5,))
    found, wanted = trajectory_step(one.lm, one.editor, [batch]), meta_step(two.lm, two.editor, batch)
    assert found.meta_loss == wanted.meta_loss and found.grad_norm == wanted.grad_norm
    for name, value in two.editor.state_dict().items():
        assert torch.equal(one.editor.state_dict()[name], value), name


def test_the_normaliser_has_seen_all_batches_once_the_trajectory_ends() -> None:
    one, two = (make_setup("gpt2", training=TRAJECTORY) for _ in range(2))
    batches = _batches(one.lm)
    trajectory_step(one.lm, one.editor, batches)
    everything = [fact for batch in batches for fact in batch.edits]
    two.editor.observe(trace(two.lm, two.editor.layers, [one_batch(everything, two.lm.pad_id)], "answer"))
    found, wanted = one.editor.state_dict(), two.editor.state_dict()
    counts = [name for name in wanted if "norm" in name and "count" in name]
    assert counts and all(torch.equal(found[name], wanted[name]) for name in counts)


def test_a_config_is_made_rledits_and_otherwise_kept() -> None:
    raw = {"training": {"locality_target": 0.1, "num_edits": 40}, "baselines": {"rledit": {"trajectory": 5}}}
    config = Config.model_validate(raw)
    found = METHODS["rledit"].training_config(config).training
    assert (found.trajectory, found.locality_coef, found.locality_target, found.num_edits) == (5, 0.6, None, 40)
    assert config.training.trajectory == 1 and METHODS["malmen"].training_config(config) == config


def test_a_trajectory_with_a_locality_target_is_refused() -> None:
    with pytest.raises(ValueError, match="a trajectory has no locality_target"):
        Config.model_validate({"training": {"trajectory": 2, "locality_target": 0.1}})


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    from malmen.platform.train import train as train_on_ray

    with pytest.raises(UsageError, match=r"training\.trajectory is 3, but only one process trains .* --local"):
        train_on_ray(make_config(trajectory=3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Stopped(Exception):
    pass


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_in_the_same_editor(lm: LanguageModel, tmp_path: Path) -> None:
    def stop(step: int, _report: object) -> None:
        if step == 3:
            raise Stopped

    config = METHODS["rledit"].training_config(make_config(num_edits=9, steps=4))
    whole = train(config, tmp_path / "whole", lm=lm)
    with pytest.raises(Stopped):
        train(config, tmp_path / "killed", lm=lm, on_step=stop)
    resumed = train(config, tmp_path / "killed", lm=lm)
    for name, value in whole.editor.state_dict().items():
        assert torch.equal(resumed.editor.state_dict()[name], value), name
