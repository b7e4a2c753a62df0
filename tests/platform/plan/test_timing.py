"""The plan's FLOPs against closed forms: what a step multiplies, by pencil."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import PLAIN

from malmen.config import Config, load_config
from malmen.platform.plan.planner import Planner, PlanOptions

CONFIGS = Path(__file__).parents[3] / "platform" / "configs"
TOLERANCE = 1e-9  # of every stage: facts of one length leave nothing to be estimated

# The built-in GPT-2: hidden size, blocks, vocabulary; size of a key (the FFN's inner one) and of a value.
HIDDEN, BLOCKS, VOCABULARY = 160, 6, 1024
KEY, VALUE = 4 * HIDDEN, HIDDEN
LENGTH, ANSWERS = 11, 3  # tokens that the model reads of a fact of 12, and its answer's


def _config(edits: int, layers: int, *overrides: str) -> Config:
    small = [f"training.num_edits={edits}", f"editor.layers=last:{layers}", "editor.rank=64", "model.dtype=float32"]
    return load_config(CONFIGS / "builtin.yaml", [*PLAIN, *small, "editor.tokens=answer", *overrides])


def _flops(config: Config) -> dict[str, int]:
    plan = Planner(PlanOptions(fact_tokens=LENGTH + 1, answer_tokens=ANSWERS)).plan(config)
    return {stage.name: stage.flops for stage in plan.stages}


def _block(facts: int, outputs: int = LENGTH) -> float:
    """One block forward: the products of attention's and the FFN's linear maps, and attention itself. Attention reads
    every token; what follows it runs for `outputs` of them."""
    return HIDDEN**2 * facts * (6 * LENGTH + 18 * outputs) + 4 * HIDDEN * LENGTH**2 * facts


def _block_back(facts: int, inputs: int = LENGTH, outputs: int = LENGTH) -> float:
    """From `outputs` tokens back to `inputs` of a block. Weights are frozen, so a map costs one product again;
    attention's two become five."""
    return HIDDEN**2 * facts * (6 * inputs + 18 * outputs) + 10 * HIDDEN * LENGTH**2 * facts


def _head(facts: int) -> float:
    """The vocabulary at the answers alone, forward; the way back is as much."""
    return 2 * HIDDEN * VOCABULARY * facts * ANSWERS


def _forward(facts: int, blocks: int = BLOCKS) -> float:
    """The upper `blocks` and the head. The last block's outputs are needed at the answers alone."""
    return (blocks - 1) * _block(facts) + _block(facts, ANSWERS) + _head(facts)


CASES = pytest.mark.parametrize(("edits", "layers"), [(64, 1), (64, 2), (300, 2)])  # 300: in 4 micro-batches


@CASES
def test_a_trace_is_one_pass_forward_and_a_way_back_to_the_first_edit(edits: int, layers: int) -> None:
    backward = (layers - 1) * _block_back(edits, ANSWERS, ANSWERS) + _head(edits)  # value gradients of the answers
    assert _flops(_config(edits, layers))["trace"] == pytest.approx(_forward(edits) + backward, rel=TOLERANCE)


@CASES
def test_the_meta_loss_is_two_passes_of_the_edited_model_and_the_unedited_one_above_the_stem(
    edits: int, layers: int
) -> None:
    to_shifts = 2 * KEY * VALUE * edits * ((layers - 1) * LENGTH + ANSWERS)  # ∇_W̃ of each edited layer
    backward = (layers - 1) * _block_back(edits, outputs=ANSWERS) + _head(edits) + to_shifts
    equivalents = _forward(edits) + backward
    reference = _forward(edits)  # no gradient; leaves its stem to the edited pass
    unrelated = reference + _forward(edits, layers) + backward
    assert _flops(_config(edits, layers))["meta_loss"] == pytest.approx(equivalents + unrelated, rel=TOLERANCE)


@CASES
@pytest.mark.parametrize("rows", [4096, 128])  # activations kept, and computed again
def test_solve_and_hypernet_are_the_network_and_the_normal_equation(edits: int, layers: int, rows: int) -> None:
    config = _config(edits, layers, f"batch.hypernet_rows={rows}")
    tokens, features, rank, blocks = edits * ANSWERS, KEY + VALUE, config.editor.rank, config.editor.blocks
    kept = layers * tokens <= rows
    forward = layers * tokens * blocks * 4 * features * rank
    backward = 2 * forward - layers * tokens * 2 * features * rank  # the features themselves take no gradient
    backward += blocks * 2 * (2 * layers * layers * tokens * features)  # of scale and shift, sums by layer
    if tokens < KEY:  # the dual form
        gram, cross, cholesky = 2 * tokens**2 * KEY, 2 * tokens * VALUE * KEY, tokens**3 / 3
        solve = 2 * tokens**2 * VALUE
        pullback = 2 * tokens * VALUE * KEY + solve
    else:
        gram, cross, cholesky = 2 * tokens * KEY**2, 2 * tokens * VALUE * KEY, KEY**3 / 3
        solve = 2 * KEY**2 * VALUE
        pullback = solve + 2 * tokens * KEY * VALUE  # M, and its rows ∇_D L = MU
    flops = _flops(config)
    assert flops["solve"] == pytest.approx(forward + layers * (gram + cross + cholesky + solve), rel=TOLERANCE)
    again = 0 if kept else forward
    assert flops["hypernet"] == pytest.approx(again + backward + layers * pullback, rel=TOLERANCE)


def test_a_card_that_is_slow_in_float64_has_its_sums_sliced_into_float32() -> None:
    """6 products of a gram's 16 pairs of slices are mirrored; the cross term needs all 16."""
    config = _config(300, 1, "cluster.lm_gpus=1", "cluster.hypernet_gpus=1")
    plans = {
        (card, products): Planner(
            PlanOptions(fact_tokens=LENGTH + 1, answer_tokens=ANSWERS, lm_card="A100-80", hypernet_card=card)
        ).plan(config.model_copy(update={"editor": config.editor.model_copy(update={"products": products})}))
        for card, products in (("A10G", "auto"), ("A10G", "sliced"), ("A10G", "float64"), ("A100-80", "auto"))
    }
    solve = {key: next(stage for stage in plan.stages if stage.name == "solve") for key, plan in plans.items()}
    tokens = 300 * ANSWERS
    more = (10 - 1) * 2 * tokens * KEY**2 + (16 - 1) * 2 * tokens * VALUE * KEY
    assert solve["A10G", "auto"] == solve["A10G", "sliced"]
    assert solve["A10G", "auto"].flops == solve["A10G", "float64"].flops + more
    assert solve["A10G", "auto"].seconds < solve["A10G", "float64"].seconds
    assert solve["A100-80", "auto"].flops == solve["A10G", "float64"].flops
