"""The backbone: the staged, cut, tricked computation equals autograd through everything."""

from __future__ import annotations

import random
from typing import Any

import plain
import pytest
import torch
from tiny_models import Setup, make_setup, random_facts
from torch import Tensor
from torch.testing import assert_close

from malmen.data.tokens import EncodedFact, MetaBatch, make_batches
from malmen.errors import EditError
from malmen.least_squares import NormalEquation
from malmen.lm.trace import Traces, trace
from malmen.lm_side import LMSide
from malmen.methods.mend import SETTINGS as MEND

pytestmark = pytest.mark.usefixtures("exact")
EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}


def make_batch(setup: Setup, edits: int = 5) -> MetaBatch:
    lm = setup.lm
    return MetaBatch(random_facts(lm, edits, 1), random_facts(lm, 4, 2), random_facts(lm, 3, 3))


def staged_gradient(setup: Setup, batch: MetaBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Shifts and ∇_θ L_meta the way `meta_step` computes them, without the Adam step."""
    lm, editor = setup.lm, setup.editor
    budget = editor.config.batch.token_budget
    traces = trace(lm, editor.layers, make_batches(batch.edits, budget, 0), editor.config.editor.tokens)
    editor.observe(traces)
    solved = editor.solve(traces, training=True)
    _, shift_grads = LMSide(lm, editor.layers, editor.config).meta_backward(0, batch, solved.shifts)
    editor.backward(solved, shift_grads)
    grads = {name: value.grad for name, value in editor.named_parameters() if value.grad is not None}
    return {name: shift.detach() for name, shift in solved.shifts.items()}, grads


def oracle_gradient(setup: Setup, batch: MetaBatch, traces: Traces) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fig. 2: one graph from θ to the meta loss."""
    editor, shifts = setup.editor, {}
    for shape, members in editor.groups.items():
        net: Any = editor.nets[shape]
        for index, layer in enumerate(members):
            keys, value_grads = traces[layer.name]
            pseudo_keys, scaled_grads, roots = net(torch.full((len(keys),), index), keys, value_grads)
            if editor.config.editor.aggregation == "sum":
                shifts[layer.name] = torch.einsum("nv,nk->vk", scaled_grads, pseudo_keys)
                continue
            diffs = torch.einsum("nv,nk,nk->nv", scaled_grads, pseudo_keys, keys)
            if not editor.config.editor.regularisation:  # of all S with SU = D the smallest
                shifts[layer.name] = torch.linalg.solve(keys @ keys.T, diffs).T @ keys
                continue
            weights = torch.ones(len(keys), 1, dtype=keys.dtype) if roots is None else roots[:, None] ** 2
            gram = keys.T @ (weights * keys) + net.log_damping[index].exp() * torch.eye(
                layer.key_size, dtype=keys.dtype
            )
            if weight := editor.config.editor.preserved_weight:
                learned = net.log_preserved_weight
                gram = gram + (weight if learned is None else learned[index].exp()) * net.moments[index]
            if weight := editor.config.editor.phrasing_weight:
                learned = net.log_phrasing_weight
                gram = gram + (weight if learned is None else learned[index].exp()) * net.phrasing_moments[index]
            cross = keys.T @ (weights * diffs)
            if threshold := editor.config.editor.preserved_null_space:  # S = X Ûᵀ
                values, vectors = torch.linalg.eigh(net.moments[index])
                basis = vectors[:, values < threshold * values.mean()]
                assert 0 < basis.shape[1] < layer.key_size
                shifts[layer.name] = torch.linalg.solve(basis.T @ gram @ basis, basis.T @ cross).T @ basis.T
                continue
            shifts[layer.name] = torch.linalg.solve(gram, cross).T
    loss: Any = 0.0
    for fact in batch.equivalents:
        loss = loss + plain.plain_nll(setup.lm, fact, shifts) / len(batch.equivalents)
    for fact in batch.unrelated:
        reference, log_probs = (plain.plain_log_probs(setup.lm, fact, some) for some in ({}, shifts))
        divergence = (reference.exp() * (reference - log_probs)).sum()
        loss = loss + 0.7 * divergence / len(batch.unrelated)
    names, values = zip(*editor.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, values, allow_unused=True)
    return shifts, {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def plain_traces(setup: Setup, facts: list[EncodedFact]) -> Traces:
    """Keys and value gradients of each fact by itself, by retained gradients of a model with trainable weights."""
    return plain.plain_traces(setup.lm, setup.editor.layers, facts, setup.editor.config.editor.tokens)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"aggregation": "sum"},
    dict(MEND),
    {"tokens": "all"},
    {"ffn": "first"},
    {"layers": "all"},
    {"layers": "last:2", "attention": True, "preserved_weight": 2.0},
    {"regularisation": False},
    {"preserved_weight": 2.0},
    {"preserved_weight": 2.0, "learn_preserved_weight": True},
    {"phrasing_weight": 3.0},
    {"preserved_weight": 2.0, "phrasing_weight": 3.0, "learn_preserved_weight": True},
    {"preserved_null_space": 0.5},
    {"preserved_null_space": 0.5, "phrasing_weight": 3.0},
    {"preserved_null_space": 0.5, "preserved_weight": 2.0, "learn_preserved_weight": True, "token_weights": "learned"},
    {"token_weights": "learned", "tokens": "all"},
    {"token_weights": "learned", "preserved_weight": 2.0, "learn_preserved_weight": True},
    {"parametrisation": "paper", "damping": 3.0},  # its wide maps cost digits: T5 would be at the tolerance with 0.3
]


def _name(variant: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in variant.items()) or "defaults"


@pytest.mark.parametrize("variant", VARIANTS, ids=_name)
def test_the_staged_meta_gradient_is_autograd_through_everything(kind: str, variant: dict[str, Any]) -> None:
    setup = make_setup(kind, **variant)
    undamped = "regularisation" in variant
    batch = make_batch(setup, edits=2 if undamped else 5)  # undamped, keys must be independent, so few
    traces = plain_traces(setup, list(batch.edits))
    assert not undamped or all(keys.shape[0] < keys.shape[1] for keys, _ in traces.values())
    shifts, grads = staged_gradient(setup, batch)
    oracle_shifts, oracle_grads = oracle_gradient(setup, batch, traces)
    assert set(grads) == set(oracle_grads)
    assert any("log_damping" in name for name in grads) == (not undamped and "aggregation" not in variant)
    for name, shift in oracle_shifts.items():
        assert_close(shifts[name], shift.detach(), **EXACT)
    for name, grad in oracle_grads.items():
        assert grad.any(), name
        # An entry is a sum whose terms are as large as the largest entries, and so is its rounding error.
        tolerance = {**EXACT, "atol": EXACT["atol"] * max(1.0, 3 * float(grad.abs().max()))}
        assert_close(grads[name], grad, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "opt"])
def test_further_families_are_exact_too(name: str) -> None:
    setup = make_setup(name)
    batch = make_batch(setup)
    _, grads = staged_gradient(setup, batch)
    _, oracle_grads = oracle_gradient(setup, batch, plain_traces(setup, list(batch.edits)))
    for parameter, grad in oracle_grads.items():
        assert_close(grads[parameter], grad, **EXACT)


@pytest.mark.slow  # 40 cases
@pytest.mark.parametrize("aggregation", ["least_squares", "sum"])
@pytest.mark.parametrize(("budget", "rows"), [(1, 1), (17, 3), (40, 7)])
def test_no_cut_of_the_work_changes_shifts_or_gradients(kind: str, budget: int, rows: int, aggregation: str) -> None:
    whole = make_setup(kind, aggregation=aggregation)
    cut = make_setup(kind, aggregation=aggregation, budget=budget, rows=rows)
    batch = make_batch(whole, edits=7)
    for expected, found in zip(staged_gradient(whole, batch), staged_gradient(cut, batch), strict=True):
        assert set(expected) == set(found)
        for name in expected:
            assert_close(found[name], expected[name], **EXACT)


def test_the_order_of_facts_does_not_matter(kind: str) -> None:
    setup, shuffled = make_setup(kind), make_setup(kind)
    batch = make_batch(setup, edits=7)
    edits = list(batch.edits)
    random.Random(0).shuffle(edits)
    other = MetaBatch(edits, batch.equivalents[::-1], batch.unrelated[::-1])
    for expected, found in zip(staged_gradient(setup, batch), staged_gradient(shuffled, other), strict=True):
        for name in expected:
            assert_close(found[name], expected[name], **EXACT)


@pytest.mark.slow  # 41 facts one by one
def test_few_tokens_and_many_tokens_agree_with_the_oracle(kind: str) -> None:
    """m = 1 with a one-token answer (dual, one row), and more tokens than key dimensions (primal)."""
    for edits, longest in ((1, 1), (40, 3)):
        setup = make_setup(kind)
        facts = random_facts(setup.lm, edits, 5, max_answer=longest)
        batch = MetaBatch(facts, random_facts(setup.lm, 2, 2), random_facts(setup.lm, 2, 3))
        _, grads = staged_gradient(setup, batch)
        _, oracle_grads = oracle_gradient(setup, batch, plain_traces(setup, facts))
        for name, grad in oracle_grads.items():
            assert_close(grads[name], grad, **EXACT)


def test_adding_then_removing_facts_equals_never_having_added_them(kind: str) -> None:
    """The guests are traced once among all the others, and once by themselves to be taken out again."""
    setup = make_setup(kind, budget=40)
    lm, editor, facts = setup.lm, setup.editor, random_facts(setup.lm, 9, 1)
    editor.observe(plain_traces(setup, facts))
    together, guests = (
        {
            name: NormalEquation.of(*targets)
            for name, targets in editor.layer_targets(
                trace(lm, editor.layers, make_batches(some, 40, 0), "answer")
            ).items()
        }
        for some in (facts, facts[4:])
    )
    never = editor.solve(plain_traces(setup, facts[:4])).shifts
    back = {name: together[name] - guests[name] for name in together}
    assert_close(editor.solve_equations(back), never, rtol=1e-9, atol=1e-10)  # a difference of sums loses some digits
    again = {name: back[name] + guests[name] for name in back}
    everything = editor.solve(plain_traces(setup, facts)).shifts
    assert_close(editor.solve_equations(again), everything, rtol=1e-9, atol=1e-10)


def test_an_editor_that_was_not_told_which_keys_to_preserve_says_so() -> None:
    setup = make_setup("gpt2", preserved_weight=2.0)
    traces = plain_traces(setup, random_facts(setup.lm, 4, 1))
    setup.editor.observe(traces)
    last = setup.editor.layers[-1]
    with pytest.raises(EditError, match=r"layer transformer\.h\.2.*keys to preserve are not finite"):
        setup.editor.preserve({last.name: torch.full((1, last.key_size, last.key_size), torch.nan)})
    (net,) = setup.editor.nets.values()
    net.moments[1] = torch.nan  # as it is made
    with pytest.raises(EditError, match=r"layer transformer\.h\.2.*preserved_weight is 2, .* has no keys to preserve"):
        setup.editor.solve(traces)


def test_the_more_keys_weigh_the_less_their_outputs_change() -> None:
    moved = []
    for weight in (0.1, 1.0, 10.0):
        setup = make_setup("gpt2", preserved_weight=weight)
        traces = plain_traces(setup, random_facts(setup.lm, 9, 1))
        setup.editor.observe(traces)
        shifts = setup.editor.solve(traces).shifts
        (net,) = setup.editor.nets.values()
        # E‖Su‖² = tr(S E[uuᵀ] Sᵀ)
        moved.append([float((shifts[layer.name] @ net.moments[index]).mul(shifts[layer.name]).sum())
                      for index, layer in enumerate(setup.editor.layers)])  # fmt: skip
    assert all(first > second > third for first, second, third in zip(*moved, strict=True))


def test_solving_does_not_change_the_editor() -> None:
    setup = make_setup("gpt2")
    facts = random_facts(setup.lm, 5, 1)
    setup.editor.observe(plain_traces(setup, facts))
    before = {name: value.clone() for name, value in setup.editor.state_dict().items()}
    setup.editor.solve(plain_traces(setup, facts))
    assert all(torch.equal(value, before[name]) for name, value in setup.editor.state_dict().items())


def test_a_residual_is_what_the_shift_misses() -> None:
    setup = make_setup("gpt2", damping=1e-9)
    traces = plain_traces(setup, random_facts(setup.lm, 4, 1))
    setup.editor.observe(traces)
    with torch.no_grad():
        for net in setup.editor.nets.values():
            net.log_damping.fill_(-20.0)
    assert setup.editor.solve(traces).mean_residual() < 1e-6
    with torch.no_grad():
        for net in setup.editor.nets.values():
            net.log_damping.fill_(30.0)
    assert setup.editor.solve(traces).mean_residual() == pytest.approx(1.0, abs=1e-6)


def test_without_regularisation_repeated_facts_are_a_clear_error() -> None:
    setup = make_setup("gpt2", regularisation=False)
    facts = random_facts(setup.lm, 3, 1) * 2
    traces = plain_traces(setup, facts)
    setup.editor.observe(traces)
    with pytest.raises(EditError, match=r"layer transformer\.h\.1\.mlp\.c_proj: .*not positive definite"):
        setup.editor.solve(traces)


@pytest.mark.parametrize("aggregation", ["least_squares", "sum"])
def test_a_value_gradient_that_is_not_finite_is_a_clear_error_that_names_the_layer(aggregation: str) -> None:
    setup = make_setup("gpt2", aggregation=aggregation)
    traces = plain_traces(setup, random_facts(setup.lm, 4, 1))
    setup.editor.observe(traces)
    traces["transformer.h.2.mlp.c_proj"].value_grads[1, 3] = float("nan")
    with pytest.raises(EditError, match=r"shift of transformer\.h\.2\.mlp\.c_proj is not finite"):
        setup.editor.solve(traces)


@pytest.mark.parametrize("aggregation", ["least_squares", "sum"])
def test_a_key_that_is_not_finite_is_a_clear_error_that_names_the_layer(aggregation: str) -> None:
    setup = make_setup("gpt2", aggregation=aggregation)
    traces = plain_traces(setup, random_facts(setup.lm, 4, 1))
    setup.editor.observe(traces)
    traces["transformer.h.2.mlp.c_proj"].keys[1, 3] = float("inf")
    with pytest.raises(EditError, match=r"transformer\.h\.2\.mlp\.c_proj.* not finite"):
        setup.editor.solve(traces)


def test_a_gradient_that_is_not_finite_stops_the_step_and_names_its_parameter_alone() -> None:
    setup = make_setup("gpt2")
    staged_gradient(setup, make_batch(setup))
    before = {name: value.clone() for name, value in setup.editor.state_dict().items()}
    names = [name for name, _ in setup.editor.named_parameters()]
    name = "nets.48x12.blocks.1.up"
    assert 0 < names.index(name) < len(names) - 1
    setup.editor.get_parameter(name).grad[2, 1] = float("nan")  # type: ignore[index]
    with pytest.raises(EditError, match=r"^the meta-gradient is not finite in nets\.48x12\.blocks\.1\.up$"):
        setup.editor.step()
    assert setup.editor.steps_done == 0
    assert all(torch.equal(value, before[name]) for name, value in setup.editor.state_dict().items())


def test_statistics_and_residuals_do_not_depend_on_how_many_rows_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, twin = make_setup("gpt2"), make_setup("gpt2")
    traces = plain_traces(setup, random_facts(setup.lm, 7, 4))
    setup.editor.observe(traces)
    whole = setup.editor.solve(traces).residuals()
    monkeypatch.setattr("malmen.editor.ROWS_AT_ONCE", 3)
    twin.editor.observe(traces)
    assert_close(twin.editor.state_dict(), setup.editor.state_dict(), rtol=1e-12, atol=1e-14)
    assert_close(twin.editor.solve(traces).residuals(), whole, rtol=1e-9, atol=1e-12)
