from __future__ import annotations

import multiprocessing
from datetime import timedelta
from fractions import Fraction
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from malmen.least_squares import solve_least_squares
from malmen.preserved import Preserved, TermMoments
from malmen.shards import ProcessGroupShards, Shards, Share, divide


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


def _solve(rank: int, port: int, tokens: int, answers: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    keys, diffs = _tokens(tokens)
    mine = Share("layer", Fraction(rank, 2), Fraction(rank + 1, 2)).rows(tokens)
    shards = ProcessGroupShards({"layer": 40}, 60)
    shifts = [
        shards.solve("layer", keys[mine], diffs[mine], 0.1, None, sliced=how).shift.tolist() for how in (True, False)
    ]
    answers.send((shifts, mine.start, [_pulled(shards, keys[mine], diffs[mine], some) for some in _preserved()]))


def _preserved() -> list[Preserved]:
    """Of two lots of 50 other keys, and confined to some eigenvectors of the first."""
    torch.manual_seed(1)
    moments = [others.T @ others / 50 for others in torch.randn(2, 50, 32, dtype=torch.float64)]
    return [Preserved(TermMoments(moments, threshold), [2.0, 0.5]) for threshold in (None, 0.5)]


def _pulled(shards: Shards, keys: torch.Tensor, diffs: torch.Tensor, preserved: Preserved) -> list[list[float]]:
    """S*, ∇_D L, dL/dλ and all dL/d log w as these shards find them, of an editor's tokens."""
    solution = shards.solve("layer", keys, diffs, 0.1, preserved, sliced=False)
    pullback = solution.pull_back(torch.sin(torch.arange(256.0)).view(8, 32), keys)
    found = solution.shift, pullback.rows(keys, slice(None)), pullback.damping_grad
    return [part.flatten().tolist() for part in (*found, *pullback.weight_grads(solution.shift, preserved))]


def _tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(count, 32), torch.randn(count, 8)


@pytest.mark.slow  # two processes import torch
@pytest.mark.parametrize("tokens", [6, 20, 100])  # the dual form, the primal one with preserved keys, and without
def test_two_editors_solve_as_one_does_with_keys_to_preserve_and_without_and_slice_or_not(tokens: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=_solve, args=(rank, store.port, tokens, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    try:
        assert all(mine.poll(60) for mine, _ in pipes)
        answers = [mine.recv() for mine, _ in pipes]
    finally:
        for rank in ranks:
            rank.join(30)
    expected = solve_least_squares(*_tokens(tokens), 0.1).shift
    alone = [_pulled(Shards(), *_tokens(tokens), preserved) for preserved in _preserved()]
    for rank, (shifts, first, pulled) in enumerate(answers):
        sliced, plain = (torch.tensor(shift, dtype=torch.float64) for shift in shifts)
        assert_close(plain, expected, rtol=1e-9, atol=1e-12)
        assert_close(sliced, expected, rtol=1e-6, atol=1e-8)
        assert not torch.equal(sliced, plain)
        assert first == rank * tokens // 2
        for (shift, diffs_grad, *scalars), (one_shift, one_grad, *one_scalars) in zip(pulled, alone, strict=True):
            part = one_grad[8 * first : 8 * (first + tokens // 2)]
            assert_close((shift, diffs_grad, scalars), (one_shift, part, one_scalars), rtol=1e-9, atol=1e-12)
