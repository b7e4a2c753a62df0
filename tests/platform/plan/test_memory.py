"""What the plan rehearses is what real tensors take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import PLAIN
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from malmen.config import Config, load_config
from malmen.data.tokens import TokenBatch, make_batches
from malmen.data.world import world_records
from malmen.editor import Editor
from malmen.least_squares import DualSolution, PreservingSolution, PrimalSolution
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, fact_encoder, load_lm
from malmen.lm.overlay import Overlay
from malmen.lm.trace import Traces, trace
from malmen.lm_side import LMSide
from malmen.platform.plan.data import StepFacts
from malmen.platform.plan.hypernet import find_equations, rehearse_hypernet
from malmen.platform.plan.lm import plan_lm, rehearse_lm
from malmen.platform.plan.meter import Meter

CONFIGS = Path(__file__).parents[3] / "platform" / "configs"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load_lm("builtin")


@pytest.fixture(scope="module")
def facts(lm: LanguageModel) -> StepFacts:
    """Real facts of eight records."""
    encode = fact_encoder(lm, _builtin().data).encode
    records = world_records("train")[:8]
    roles = ([r.edit for r in records], [r.equivalents[0] for r in records], [r.unrelated[0] for r in records])
    edits, equivalents, unrelated = ([encode(fact) for fact in some] for some in roles)
    return StepFacts(edits, equivalents, unrelated, {}, 0, "a test")


def _builtin(*overrides: str) -> Config:
    small = ["training.num_edits=8", "editor.rank=64", "editor.layers=last:1"]
    return load_config(CONFIGS / "builtin.yaml", [*PLAIN, *small, *overrides])


def _editor(lm: LanguageModel, config: Config) -> Editor:
    editor = Editor(find_layers(lm.model, config.editor.layers), config)
    if config.editor.preserving:
        terms = len(config.editor.preserved_terms)
        editor.preserve({layer.name: torch.eye(layer.key_size).expand(terms, -1, -1) for layer in editor.layers})
    return editor


def _cut(some: Any) -> list[TokenBatch]:
    return make_batches(some, 4096, 0)


def _bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def _traces(lm: LanguageModel, facts: StepFacts, config: Config) -> Traces:
    return LMSide(lm, find_layers(lm.model, config.editor.layers), config).trace(facts.edits)


def test_bytes_of_the_lm_are_those_of_the_loaded_one(lm: LanguageModel) -> None:
    planned = plan_lm(_builtin(), torch.float32)
    assert planned.weight_bytes == _bytes(*lm.model.parameters(), *lm.model.buffers())
    assert planned.num_parameters == sum(parameter.numel() for parameter in lm.model.parameters())


@pytest.mark.parametrize("tokens", ["answer", "all"])
def test_bytes_of_features_are_those_of_a_real_trace(lm: LanguageModel, facts: StepFacts, tokens: str) -> None:
    config = _builtin(f"editor.tokens={tokens}")
    real = _bytes(*(part for pair in _traces(lm, facts, config).values() for part in pair))
    planned = plan_lm(config, torch.float32)
    assert planned.feature_bytes(facts.edits, tokens) == real
    assert rehearse_hypernet(config, planned.layers, facts.edits, torch.float32).features == real


def test_theta_and_adam_are_those_of_a_real_editor(lm: LanguageModel, facts: StepFacts) -> None:
    config = _builtin()
    editor = _editor(lm, config)
    for parameter in editor.parameters():
        parameter.grad = torch.zeros_like(parameter)
    editor.step()
    found = rehearse_hypernet(config, editor.layers, facts.edits, torch.float32)
    assert found.theta == _bytes(*editor.parameters())
    assert found.norms == _bytes(*editor.buffers())
    assert found.adam == _bytes(*editor.optimizer_state().values())


@pytest.mark.parametrize(("tokens", "repeats", "form"), [("answer", 1, "dual"), ("all", 8, "primal")])
@pytest.mark.parametrize("weight", [0, 1])
def test_what_a_real_solve_keeps_is_what_was_planned(
    lm: LanguageModel, facts: StepFacts, tokens: str, repeats: int, form: str, weight: int
) -> None:
    preserving = [f"editor.preserved_weight={weight}", "editor.learn_preserved_weight=false"]
    config = _builtin(f"editor.tokens={tokens}", *preserving)
    edits = facts.edits * repeats
    editor = _editor(lm, config)
    traces = trace(lm, editor.layers, [batch for _ in range(repeats) for batch in _cut(facts.edits)], tokens)
    solved = editor.solve(traces)
    found = rehearse_hypernet(config, editor.layers, edits, torch.float32)
    kept = 0
    for solution in solved.solutions.values():
        assert isinstance(solution, PrimalSolution | DualSolution | PreservingSolution)
        kept += _bytes(solution.factor, None if isinstance(solution, PrimalSolution) else solution.weights)
        if isinstance(solution, PreservingSolution):
            kept += _bytes(solution.spread, *vars(solution.metric).values())
    assert found.forms == {form}
    for one in find_equations(config, editor.layers, edits):
        assert one.form == form
        assert one.gram == one.factor == _bytes(solved.solutions[one.layer].factor)  # type: ignore[union-attr]
    assert (found.kept, found.shifts) == (kept, _bytes(*solved.shifts.values()))
    assert found.value_diffs == _bytes(*solved.value_diffs.values())


@pytest.mark.parametrize("rows", [4096, 16])
def test_the_editors_rehearsal_holds_as_much_as_the_step(lm: LanguageModel, facts: StepFacts, rows: int) -> None:
    config = _builtin(f"batch.hypernet_rows={rows}")
    traces = _traces(lm, facts, config)
    editor = _editor(lm, config)
    meter = Meter(*editor.parameters(), *editor.buffers(), *(part for pair in traces.values() for part in pair))
    with meter:
        editor.observe(traces)
        solved = editor.solve(traces, training=True)
        solved.residuals()
        editor.backward(solved, {name: shift.float() for name, shift in solved.shifts.items()})
    found = rehearse_hypernet(config, editor.layers, facts.edits, torch.float32)
    assert found.peak - found.features == pytest.approx(meter.peak, rel=0.02)


def test_the_lms_rehearsal_holds_and_executes_as_much_as_the_step(lm: LanguageModel, facts: StepFacts) -> None:
    config = _builtin()
    layers = find_layers(lm.model, config.editor.layers)
    side = LMSide(lm, layers, config)
    found = rehearse_lm(config, plan_lm(config, torch.float32), facts, device="cuda")
    meter = Meter(*lm.model.parameters(), *lm.model.buffers())
    with meter, FlopCounterMode(display=False) as counter:
        side.trace(facts.edits)
    assert found.trace_peak == pytest.approx(meter.peak, rel=0.05)
    assert found.costs["trace"].total_flops == pytest.approx(counter.get_total_flops(), rel=0.05)
    shifts = {layer.name: torch.zeros(layer.value_size, layer.key_size) for layer in layers}
    meter = Meter(*lm.model.parameters(), *lm.model.buffers(), *shifts.values())
    with meter, FlopCounterMode(display=False) as counter:
        edit = Overlay.of_leaves(lm, shifts)
        side.generalization_backward(edit, facts.equivalents)
        side.locality_backward(edit, facts.unrelated)
    assert found.meta_peak == pytest.approx(meter.peak, rel=0.05)
    assert found.costs["meta_loss"].total_flops == pytest.approx(counter.get_total_flops(), rel=0.05)
