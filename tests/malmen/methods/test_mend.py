"""MEND is MALMEN's hyper-network with summed shifts; its gradient is tested beside MALMEN's (test_editor.py)."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_setup, random_facts
from torch.testing import assert_close

from malmen.config import Config
from malmen.data.tokens import make_batches
from malmen.lm.trace import trace
from malmen.methods.mend import SETTINGS, sum_residual
from malmen.methods.registry import METHODS


def test_the_shift_is_the_sum_of_each_tokens_own() -> None:
    setup = make_setup("gpt2", **SETTINGS)
    editor, lm = setup.editor, setup.lm
    facts = random_facts(lm, 4)
    traces = trace(lm, editor.layers, make_batches(facts, 4096, lm.pad_id), "all")
    editor.observe(traces)
    found = editor.solve(traces).shifts
    for layer in editor.layers:
        net, index = editor._find(layer.name)
        total = torch.zeros_like(found[layer.name])
        for key, grad in zip(*traces[layer.name], strict=True):
            pseudo_key, scaled_grad, _ = net(torch.tensor([index]), key[None], grad[None])
            total += torch.outer(scaled_grad[0], pseudo_key[0])
        assert_close(found[layer.name], total.detach(), rtol=1e-9, atol=1e-12)


def test_a_config_is_made_mends_and_otherwise_kept() -> None:
    config = Config.model_validate({"seed": 3, "editor": {"rank": 8, "tokens": "answer"}})
    found = METHODS["mend"].training_config(config)
    assert found.editor.aggregation == "sum" and found.editor.tokens == "all"
    assert found.editor.rank == 8 and found.seed == 3
    assert config.editor.aggregation == "least_squares" and found.editor.edit_lr == config.editor.edit_lr


def test_mend_may_have_an_edit_lr_of_its_own() -> None:
    config = Config.model_validate({"editor": {"edit_lr": 1e-3}, "baselines": {"mend": {"edit_lr": 1e-5}}})
    assert METHODS["mend"].training_config(config).editor.edit_lr == 1e-5 and config.editor.edit_lr == 1e-3


def test_the_residual_of_a_sum_is_what_each_token_misses_of_its_own_shift() -> None:
    setup = make_setup("gpt2", **SETTINGS)
    editor, lm = setup.editor, setup.lm
    traces = trace(lm, editor.layers, make_batches(random_facts(lm, 4), 4096, lm.pad_id), "all")
    editor.observe(traces)
    shifts, residuals = editor.solve(traces).shifts, []
    for layer in editor.layers:
        net, index = editor._find(layer.name)
        for key, grad in zip(*traces[layer.name], strict=True):
            pseudo_key, scaled_grad = (
                part[0].detach() for part in net(torch.tensor([index]), key[None], grad[None])[:2]
            )
            wanted = torch.outer(scaled_grad, pseudo_key) @ key
            residuals.append(float((shifts[layer.name] @ key - wanted).norm() / wanted.norm()))
    assert sum_residual(editor, traces) == pytest.approx(sum(residuals) / len(residuals), rel=1e-9)
