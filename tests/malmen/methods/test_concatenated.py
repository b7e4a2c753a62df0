"""One graph gives the gradient of the decomposed step."""

from __future__ import annotations

import pytest
from tiny_models import make_setup, random_facts
from torch.testing import assert_close

from malmen.data.tokens import TokenBatch, make_batches
from malmen.errors import EditError
from malmen.lm.trace import trace
from malmen.meta import MetaBatch, leaf_grads, make_leaves, meta_backward
from malmen.methods.concatenated import concatenated_backward


@pytest.mark.parametrize("edits", [2, 9])  # fewer and more tokens than a key has numbers
@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_autograd_through_everything_is_the_decomposed_gradient(edits: int, weight: float) -> None:
    one, two = (make_setup("gpt2", layers="all", preserved_weight=weight) for _ in range(2))
    facts = random_facts(one.lm, 3 * edits)
    batch = MetaBatch(facts[:edits], facts[edits : 2 * edits], facts[2 * edits :])
    concatenated_backward(one.lm, one.editor, batch)

    def cut(some: object) -> list[TokenBatch]:
        return make_batches(some, 64, two.lm.pad_id)  # type: ignore[arg-type]

    editor, lm = two.editor, two.lm
    traces = trace(lm, editor.layers, cut(batch.edits), editor.config.editor.tokens)
    editor.observe(traces)
    solved = editor.solve(traces, training=True)
    leaves = make_leaves(lm, solved.shifts)
    coef = editor.config.training.locality_coef
    meta_backward(lm, editor.layers, leaves, batch, (1 / edits, 1 / edits), coef, cut, {})
    editor.backward(solved, leaf_grads(leaves))
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
