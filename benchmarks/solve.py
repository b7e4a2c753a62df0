"""Primal against dual: seconds to solve one layer's normal equation and to pull a gradient back. JSON on stdout."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from malmen.least_squares import DualSolution, NormalEquation, Solution


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The best of some runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--key-size", type=int, default=3072, help="GPT-2's second FFN linear")
    parser.add_argument("--value-size", type=int, default=768)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512, 1024, 2048, 3072, 6144])
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    shift_grad = torch.randn(args.value_size, args.key_size)
    for tokens in args.tokens:
        keys, diffs = torch.randn(tokens, args.key_size), torch.randn(tokens, args.value_size)

        def whole(solve: Callable[[], Solution], keys: torch.Tensor = keys) -> Callable[[], object]:
            return lambda: solve().pull_back(shift_grad, keys).rows(keys, slice(None))

        primal = seconds(whole(lambda k=keys, d=diffs: NormalEquation.of(k, d).solve(1.0)), args.repeats)
        dual = seconds(whole(lambda k=keys, d=diffs: DualSolution.of(k, d, 1.0)), args.repeats)
        rows.append(
            {"tokens": tokens, "primal_s": round(primal, 4), "dual_s": round(dual, 4), "ratio": round(primal / dual, 2)}
        )
    print(json.dumps({"key_size": args.key_size, "value_size": args.value_size, "rows": rows}))


if __name__ == "__main__":
    main()
