from __future__ import annotations

import pytest
import torch
from plain import plain_log_probs, plain_nll
from tiny_models import Setup, make_setup, random_facts
from torch import Tensor
from untouched import digest

from malmen.data.tokens import EncodedFact, MetaBatch, make_batches
from malmen.errors import EditError
from malmen.lm.model import LanguageModel
from malmen.lm.trace import trace
from malmen.meta import StepReport, meta_step, no_progress


def _batch(setup: Setup) -> MetaBatch:
    lm = setup.lm
    return MetaBatch(random_facts(lm, 5, 1), random_facts(lm, 4, 2), random_facts(lm, 3, 3))


def _first_gradient(setup: Setup) -> dict[str, Tensor]:
    """The gradient of the one step that was taken: Adam's first mean is a tenth of it."""
    state = setup.editor.optimizer().state
    return {name: 10 * state[value]["exp_avg"] for name, value in setup.editor.named_parameters()}


@pytest.mark.slow
def test_twenty_steps_lower_the_meta_loss_and_leave_the_model_alone(kind: str) -> None:
    setup = make_setup(kind, training={"meta_lr": 0.02})
    batch, before = _batch(setup), digest(setup.lm)
    reports = [meta_step(setup.lm, setup.editor, batch) for _ in range(20)]
    assert setup.editor.steps_done == 20
    assert reports[-1].meta_loss < 0.95 * reports[0].meta_loss
    assert digest(setup.lm) == before
    assert all(parameter.grad is None for parameter in setup.lm.model.parameters())


@pytest.mark.parametrize(("meta_lr", "warns"), [(1e-7, True), (0.02, False)])
def test_a_run_whose_first_steps_teach_nothing_says_so_once(meta_lr: float, warns: bool) -> None:
    setup = make_setup("gpt2", training={"meta_lr": meta_lr})
    batch, history, warnings = _batch(setup), [], []
    for step in range(1, 25):
        report = meta_step(setup.lm, setup.editor, batch)
        history.append({"step": step, **vars(report), "edit_lr": setup.editor.edit_lr()})
        warnings += [(step, text) for text in [no_progress(history, setup.editor.config)] if text]
        history += [{"step": step, "scores": {}}] * (step == 7)  # an evaluation's row
    assert [step for step, _ in warnings] == ([20] if warns else [])
    assert all("Raise training.meta_lr (1e-07)" in text for _, text in warnings)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_losses_reported_are_those_of_the_edited_model_before_the_step(kind: str, budget: int) -> None:
    setup, twin = make_setup(kind, budget=budget), make_setup(kind)
    batch = _batch(setup)
    report: StepReport = meta_step(setup.lm, setup.editor, batch)
    traces = trace(twin.lm, twin.editor.layers, make_batches(batch.edits, 10_000, 0), "answer")
    twin.editor.observe(traces)
    shifts = twin.editor.solve(traces).shifts
    with torch.no_grad():
        losses = [float(plain_nll(twin.lm, fact, shifts)) for fact in batch.equivalents]
        divergences = []
        for fact in batch.unrelated:
            reference, edited = (plain_log_probs(twin.lm, fact, some) for some in ({}, shifts))
            divergences.append(float((reference.exp() * (reference - edited)).sum()))
    assert report.generalization_loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert report.locality_loss == pytest.approx(sum(divergences) / len(divergences), rel=1e-9)
    assert report.meta_loss == pytest.approx(report.generalization_loss + 0.7 * report.locality_loss, rel=1e-12)
    assert report.grad_norm > 0


def test_a_step_without_unrelated_tuples_has_no_locality_loss() -> None:
    setup = make_setup("gpt2")
    report = meta_step(
        setup.lm, setup.editor, MetaBatch(random_facts(setup.lm, 3, 1), random_facts(setup.lm, 2, 2), [])
    )
    assert report.locality_loss == 0.0
    assert report.meta_loss == report.generalization_loss > 0.0


def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_step_and_records() -> None:
    """Token 39 is broken, and only an equivalent contains it."""
    setup = make_setup("llama")
    with torch.no_grad():
        setup.lm.model.get_parameter("model.embed_tokens.weight")[39] = float("nan")
    edits = [fact for fact in random_facts(setup.lm, 12, 1) if 39 not in fact.input_ids][:7]
    names = [f"record-{number}" for number in range(7)]
    batch = MetaBatch(edits, [EncodedFact([1, 39, 2], 2, [3])], random_facts(setup.lm, 2, 3), names)
    setup.editor.steps_done = 11
    before = {name: value.clone() for name, value in setup.editor.named_parameters()}
    with pytest.raises(EditError, match=r"step 11: the meta loss is nan; .* record-0, .*record-4 … \(7 edits\)"):
        meta_step(setup.lm, setup.editor, batch)
    assert setup.editor.steps_done == 11
    assert all(torch.equal(value, before[name]) for name, value in setup.editor.named_parameters())


def test_what_breaks_in_the_solve_or_the_meta_gradient_names_step_and_records_too() -> None:
    setup = make_setup("gpt2")
    batch = MetaBatch(random_facts(setup.lm, 3, 1), random_facts(setup.lm, 2, 2), [], ["one", "two", "three"])
    with torch.no_grad():
        next(setup.editor.parameters()).fill_(float("nan"))
    with pytest.raises(EditError, match=r"step 0: .*not finite.*; the records were one, two, three … \(3 edits\)"):
        meta_step(setup.lm, setup.editor, batch)


def test_the_gradients_of_a_half_precision_model_are_summed_in_single_precision() -> None:
    """A fact that counts 64 times in a mean of 64 weighs what it weighs alone, though each is a micro-batch.

    Both gradients are made of the same bfloat16 numbers, of which a float32 sum of 64 is exact and a bfloat16 sum
    is wrong in its third digit.
    """
    found = []
    for copies in (1, 64):
        setup = make_setup("gpt2", budget=1, training={"max_grad_norm": 1e9})
        lm = LanguageModel(setup.lm.model.to(torch.bfloat16), None, "decoder")
        setup = Setup(lm, setup.editor.float())
        edit, equivalent = random_facts(lm, 2, 1)
        meta_step(lm, setup.editor, MetaBatch([edit], [equivalent] * copies, []))
        found.append(_first_gradient(setup))
    alone, repeated = found
    for name, grad in alone.items():
        assert grad.any(), name
        torch.testing.assert_close(repeated[name], grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()))


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0]),
        ({"schedule": "cosine", "steps": 4}, [1.0, 0.85355, 0.5, 0.14645]),
        ({"schedule": "cosine", "steps": 4, "warmup_steps": 1}, [0.5, 0.85355, 0.5, 0.14645]),
    ],
)
def test_both_learning_rates_rise_and_fall_as_the_config_says(settings: dict[str, object], shares: list[float]) -> None:
    setup = make_setup("gpt2", training={"meta_lr": 0.01, "scalar_lr": 0.1, **settings})
    seen = []
    for _ in shares:
        meta_step(setup.lm, setup.editor, _batch(setup))
        seen.append([group["lr"] for group in setup.editor.optimizer().param_groups])
    for (network, scalars), share in zip(seen, shares, strict=True):
        assert network == pytest.approx(0.01 * share, rel=1e-4) and scalars == pytest.approx(0.1 * share, rel=1e-4)
