"""One graph gives the gradient of the decomposed step."""

from __future__ import annotations

import pytest
from tiny_models import make_setup, random_facts
from torch.testing import assert_close

from malmen.baselines.concatenated import concatenated_backward
from malmen.data.tokens import TokenBatch, make_batches
from malmen.meta import MetaBatch, leaf_grads, make_leaves, meta_backward
from malmen.trace import trace


@pytest.mark.parametrize("edits", [2, 9])  # fewer and more tokens than a key has numbers
def test_autograd_through_everything_is_the_decomposed_gradient(edits: int) -> None:
    one, two = make_setup("gpt2", layers="all"), make_setup("gpt2", layers="all")
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
        if wanted.grad is not None:
            assert_close(found.grad, wanted.grad, rtol=1e-7, atol=1e-10, msg=name)
