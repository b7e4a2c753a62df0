from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from malmen.lm.hooks import hooked, replaced_forward


def test_hooks_run_inside_only_and_are_removed_when_an_exception_passes_through() -> None:
    linear, seen = nn.Linear(2, 2), []
    inside = [(linear, lambda _module, args, _output: seen.append(args[0]))]
    ahead = [(linear, lambda _module, args: (args[0] + 1,))]
    with pytest.raises(ZeroDivisionError), hooked(ahead, before=True), hooked(inside):
        linear(torch.zeros(1, 2))
        raise ZeroDivisionError
    linear(torch.zeros(1, 2))
    assert [part.tolist() for part in seen] == [[[1.0, 1.0]]]
    assert not linear._forward_hooks and not linear._forward_pre_hooks


def test_forwards_are_replaced_inside_and_nested_ones_come_back_in_turn() -> None:
    linear = nn.Linear(2, 2)

    def run() -> float:
        return float(linear(torch.full((1, 2), 5.0)).detach().sum())

    def constant(number: float) -> tuple[nn.Module, object]:
        def forward(_keys: Tensor) -> Tensor:
            return torch.tensor(number)

        return linear, forward

    before = run()
    with replaced_forward([constant(1.0)]):  # type: ignore[list-item]
        with pytest.raises(ZeroDivisionError), replaced_forward([constant(2.0)]):  # type: ignore[list-item]
            assert run() == 2.0
            raise ZeroDivisionError
        assert run() == 1.0
    assert run() == before
    assert "forward" not in linear.__dict__
