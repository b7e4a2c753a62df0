from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from malmen.least_squares import NormalEquation
from malmen.platform.plan.meter import Cost, Meter


def test_a_meter_forgets_what_is_freed() -> None:
    meter = Meter()
    with meter:
        one = torch.empty(256, device="meta")
        other = one + one
        del one
        assert (meter.held, meter.peak) == (1024, 2048)
        del other
    assert (meter.held, meter.cost.total_flops) == (0, 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tokens", [7, 5000])  # in one part, and in several
def test_the_products_of_a_normal_equation_are_counted_in_float64(device: str, tokens: int) -> None:
    keys, diffs = torch.ones(tokens, 16, device=device), torch.ones(tokens, 12, device=device)
    meter = Meter(keys, diffs)
    with meter:
        NormalEquation.of(keys, diffs)
    assert meter.cost.flops == {torch.float64: 2 * tokens * 16 * 16 + 2 * tokens * 12 * 16}


@pytest.mark.parametrize(
    ("product", "flops"),
    [
        (lambda a, b, c: c.addmm_(a, b), 2 * 3 * 4 * 5),
        (lambda a, b, c: torch.addmm(c, a, b), 2 * 3 * 4 * 5),
        (lambda a, b, c: torch.addmm(c, a, b, out=torch.empty_like(c)), 2 * 3 * 4 * 5),
        (lambda a, b, c: torch.mm(a, b, out=c), 2 * 3 * 4 * 5),
        (lambda a, b, c: c.expand(2, 3, 5).clone().baddbmm_(a.expand(2, 3, 4), b.expand(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    ],
)
def test_every_form_of_a_product_is_counted(product: Callable[[Tensor, Tensor, Tensor], Tensor], flops: int) -> None:
    meter = Meter()
    with meter:
        product(torch.ones(3, 4), torch.ones(4, 5), torch.ones(3, 5))
    assert meter.cost.total_flops == flops


def test_what_runs_for_several_counts_as_often_until_its_stage_ends() -> None:
    costs: dict[str, Cost] = {}
    meter = Meter()
    with meter.stage(costs, "solve"):
        torch.ones(3, 4) @ torch.ones(4, 5)
        meter.weight = 10
        torch.ones(3, 4) @ torch.ones(4, 5)
    assert costs["solve"].total_flops == 11 * 2 * 3 * 4 * 5
    assert (meter.weight, meter.cost.total_flops) == (1, costs["solve"].total_flops)
