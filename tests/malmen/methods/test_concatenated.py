"""One graph gives the gradient of the decomposed step."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import make_setup, random_facts
from torch.testing import assert_close

from malmen.data.tokens import MetaBatch
from malmen.errors import EditError
from malmen.lm_side import LMSide
from malmen.methods.concatenated import concatenated_backward


@pytest.mark.parametrize("edits", [2, 9])  # fewer and more tokens than a key has numbers
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preserved_weight": 2.0},
        {"preserved_null_space": 0.5},
        {"preserved_weight": 2.0, "learn_preserved_weight": True, "token_weights": "learned"},
    ],
    ids=["plain", "preserved", "null space", "learned"],
)
def test_autograd_through_everything_is_the_decomposed_gradient(edits: int, settings: dict[str, Any]) -> None:
    one, two = (make_setup("gpt2", layers="all", budget=64, **settings) for _ in range(2))
    facts = random_facts(one.lm, 3 * edits)
    batch = MetaBatch(facts[:edits], facts[edits : 2 * edits], facts[2 * edits :])
    concatenated_backward(one.lm, one.editor, batch)

    editor, side = two.editor, LMSide(two.lm, two.editor.layers, two.editor.config)
    traces = side.trace(batch.edits)
    editor.observe(traces)
    solved = editor.solve(traces, training=True)
    _, shift_grads = side.meta_backward(0, batch, solved.shifts)
    editor.backward(solved, shift_grads)
    for (name, found), (_, wanted) in zip(one.editor.named_parameters(), editor.named_parameters(), strict=True):
        assert (found.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            assert_close(found.grad, wanted.grad, rtol=1e-7, atol=1e-10, msg=name)


@pytest.mark.parametrize("change", [{"aggregation": "sum"}, {"regularisation": False}])
def test_what_one_graph_is_not_built_for_is_refused(change: dict[str, object]) -> None:
    setup = make_setup("gpt2", layers="all")
    facts = random_facts(setup.lm, 3)
    config = setup.editor.config
    setup.editor.config = config.model_copy(update={"editor": config.editor.model_copy(update=change)})
    with pytest.raises(
        EditError,
        match=r"aggregation=least_squares and editor.regularisation=true; given are .*(sum|False)",
    ):
        concatenated_backward(setup.lm, setup.editor, MetaBatch(facts[:1], facts[1:2], facts[2:]))


def test_a_step_without_unrelated_facts_is_refused() -> None:
    setup = make_setup("gpt2", layers="all")
    facts = random_facts(setup.lm, 2)
    with pytest.raises(EditError, match="needs equivalents and unrelated facts"):
        concatenated_backward(setup.lm, setup.editor, MetaBatch(facts[:1], facts[1:], []))
