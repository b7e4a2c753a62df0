"""The trials of a sweep with and without the cache they share: seconds of the LM and in all. JSON on stdout.

    python benchmarks/sweep.py --model gpt2 --trials 3 [--layers last:6] [--edits 64] [--steps 2]

Random weights of the named shape, records of the built-in world. The trials differ in the locality coefficient, as
those of a sweep over the same layers do, and run one after the other in this process, first without and then with a
shared folder. LM seconds are those of tracing the edits and of the meta loss with its gradient; the first step of each
trial, which warms up, is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from distributed_step import write_model
from meta_step import SHAPES, gemm_rate

from malmen.config import Config
from malmen.training import train

LM_STAGES = ("trace", "meta_loss")


def make_config(args: argparse.Namespace, model: Path, trial: int, cache: Path | None) -> Config:
    """One trial."""
    return Config.model_validate(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "editor": {"layers": args.layers, "rank": args.rank},
            "training": {
                "num_edits": args.edits,
                "steps": args.steps + 1,
                "checkpoint_every": 10_000,
                "eval_edits": 2,
                "locality_coef": 0.5 * 2**trial,
            },
            "batch": {"cache_mb": args.cache_mb if cache else 0, "cache_dir": str(cache) if cache else None},
        }
    )


def run_trials(args: argparse.Namespace, model: Path, scratch: Path, cache: Path | None) -> list[dict[str, Any]]:
    """Seconds per step of each trial, one after the other."""
    rows = []
    for trial in range(args.trials):
        start = time.perf_counter()
        run = train(make_config(args, model, trial, cache), scratch / f"{'with' if cache else 'without'}-{trial}")
        steps = [row["seconds"] for row in run.history if "seconds" in row][1:]
        stages = {stage: sum(row.get(stage, 0.0) for row in steps) / len(steps) for stage in steps[0]}
        found = {
            "lm_seconds": round(sum(stages[stage] for stage in LM_STAGES), 3),
            "step_seconds": round(sum(stages.values()), 3),
            "trial_seconds": round(time.perf_counter() - start, 1),
            "stages": {stage: round(seconds, 3) for stage, seconds in stages.items()},
        }
        print(f"{'with' if cache else 'without'} a shared cache, trial {trial}: {found}", file=sys.stderr)
        rows.append(found)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="gpt2")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--edits", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", default="last:6")
    parser.add_argument("--rank", type=int, default=1920)
    parser.add_argument("--cache-mb", type=int, default=4096)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(args.model, Path(folder) / args.model)
        without = run_trials(args, model, Path(folder), None)
        cache = Path(folder) / "cache"
        shared = run_trials(args, model, Path(folder), cache)
        size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    first, further = shared[0], shared[1:]

    def ratio(name: str) -> float | None:
        return round(sum(row[name] for row in further) / len(further) / first[name], 3) if further else None

    result = {
        **vars(args),
        "gemm_gflops": round(gemm_rate() / 1e9, 1),
        "cache_mb_used": round(size / 2**20),
        "without_cache": without,
        "with_cache": shared,
        "further_to_first": {name: ratio(name) for name in ("lm_seconds", "step_seconds", "trial_seconds")},
        "with_to_without": {
            name: round(sum(row[name] for row in shared) / sum(row[name] for row in without), 3)
            for name in ("lm_seconds", "step_seconds", "trial_seconds")
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
