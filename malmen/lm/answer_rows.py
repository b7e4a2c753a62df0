"""Leaves out a decoder's work for tokens that are not of an answer, where nothing reads the result. It is exact.

Above the attention of the last block tokens no longer meet, and the head reads the answers only. And an answer ends its
text: the gradient at one of its tokens comes from that token and later ones, which belong to the answer too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from malmen.data.tokens import TokenBatch
from malmen.lm.hooks import Functions, innermost_forward, replaced_forward
from malmen.lm.layers import is_conv1d, is_linear, own_token_linears

if TYPE_CHECKING:
    from malmen.lm.model import LanguageModel

Forward = Callable[[Tensor], Tensor]


@contextmanager
def answers_only(lm: LanguageModel, batch: TokenBatch) -> Iterator[None]:
    """Inside, the FFN of a decoder's last block and the last linear of its attention run at the batch's answer
    positions; elsewhere they give zero. Those whose names are unknown run as they are. Enter it within `edited`."""
    last = own_token_linears(lm.blocks("decoder")[-1]) if lm.kind == "decoder" else []
    with _replaced(last, batch.answer_mask, _forward_at):
        yield


@contextmanager
def answer_grads_only(lm: LanguageModel, batch: TokenBatch) -> Iterator[None]:
    """Inside, a decoder's linears pass gradients back at the batch's answer positions only: there those of all values
    are right. No weight may take a gradient."""
    blocks = lm.blocks("decoder") if lm.kind == "decoder" else ()
    linears = [part for block in blocks for part in block.modules() if is_linear(part)]
    # DeepSpeed gathers a sharded weight for torch's own backward only.
    whole = [linear for linear in linears if not hasattr(linear.weight, "ds_id")]
    with _replaced(whole, batch.answer_mask, _backward_at):
        yield


@contextmanager
def _replaced(linears: list[nn.Module], mask: Tensor, at_rows: Callable[..., Tensor]) -> Iterator[None]:
    rows = mask.flatten().nonzero().squeeze(1)

    def forward(linear: nn.Module, before: Forward, keys: Tensor) -> Tensor:
        # OPT's FFN sees the tokens of all facts in one row. What sees anything else runs as it is.
        if keys.shape[:-1] not in (mask.shape, mask.flatten().shape):
            return before(keys)
        return at_rows(linear, before, rows.to(keys.device), keys)

    forwards: Functions = [
        (linear, partial(forward, linear, getattr(linear, innermost_forward(linear)))) for linear in linears
    ]
    with replaced_forward(forwards, attribute=innermost_forward):
        yield


def _forward_at(_linear: nn.Module, before: Forward, rows: Tensor, keys: Tensor) -> Tensor:
    flat = keys.flatten(0, -2)
    values = before(flat.index_select(0, rows))
    return values.new_zeros(len(flat), values.shape[-1]).index_copy(0, rows, values).unflatten(0, keys.shape[:-1])


def _backward_at(linear: nn.Module, before: Forward, rows: Tensor, keys: Tensor) -> Tensor:
    if not keys.requires_grad:
        return before(keys)
    weight = linear.get_parameter("weight")
    return _Linear.apply(keys, before, weight.T if is_conv1d(linear) else weight, rows)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    """A frozen linear layer whose backward runs for some rows only."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, before: Forward, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(weight, rows)
        return before(keys)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, rows = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        at_rows = flat.index_select(0, rows) @ weight
        whole = at_rows.new_zeros(len(flat), weight.shape[1]).index_copy_(0, rows, at_rows)
        return whole.unflatten(0, grad.shape[:-1]), None, None, None
