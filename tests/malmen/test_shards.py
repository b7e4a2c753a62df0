from __future__ import annotations

from fractions import Fraction

import pytest

from malmen.shards import Share, divide


@pytest.mark.parametrize("editors", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 6])
@pytest.mark.parametrize("rows", [0, 1, 2, 10, 17])
def test_the_shares_of_a_layer_cover_its_rows_without_overlap(num_layers: int, editors: int, rows: int) -> None:
    layers = [f"layer{index}" for index in range(num_layers)]
    plan = divide(layers, editors)
    assert len(plan) == editors
    for layer in layers:
        shares = [share for shares in plan for share in shares if share.layer == layer]
        covered = [row for share in shares for row in range(rows)[share.rows(rows)]]
        assert covered == list(range(rows))


@pytest.mark.parametrize(("num_layers", "editors"), [(6, 1), (6, 2), (6, 3), (6, 6), (12, 4)])
def test_layers_are_whole_where_they_can_be(num_layers: int, editors: int) -> None:
    plan = divide([str(index) for index in range(num_layers)], editors)
    assert all(share == Share(share.layer) for shares in plan for share in shares)
    assert {len(shares) for shares in plan} == {num_layers // editors}


def test_every_editor_has_the_same_amount_of_work() -> None:
    for shares in divide(["a", "b"], 3):
        assert sum(share.stop - share.start for share in shares) == Fraction(2, 3)
