"""A meta-training step on the platform beside the same step in one process: seconds, bytes, memory. JSON on stdout.

    python benchmarks/distributed_step.py --model gpt2 --edits 64 [--steps N] [--lm-workers 1] [--actors 1]

Random weights of the named shape, records of the built-in world. One process, the platform, and the platform with
overlap run the same steps on the same data, in turn and several rounds, each in processes of its own; the first step of
each warms up and is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from meta_step import SHAPES, gemm_rate

from malmen.config import Config

WAYS = ("single", "distributed", "with_overlap")


def write_model(name: str, folder: Path) -> Path:
    """A model folder with random weights; the built-in world's tokenizer has few tokens, which every shape holds."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from malmen.data.world_model import WORLD_MODEL

    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, which transformers loads to save, has something to say
        AutoModelForCausalLM.from_config(SHAPES[name]()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(WORLD_MODEL).save_pretrained(folder)
    return folder


def make_config(args: argparse.Namespace, model: Path, *, overlap: bool = False) -> Config:
    """The paper's hyper-network on the model's last blocks."""
    return Config.model_validate(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "editor": {"layers": args.layers, "rank": args.rank},
            "training": {"num_edits": args.edits, "steps": args.steps + 1, "checkpoint_every": 10_000, "eval_edits": 2},
            "batch": {"token_budget": args.token_budget, "hypernet_rows": args.hypernet_rows, "cache_mb": 0},
            "lm": {"sharding": args.sharding},
            "cluster": {"lm_workers": args.lm_workers, "hypernet_actors": args.actors, "overlap": overlap},
            "tracking": {"enabled": False},
        }
    )


def single(config: Config) -> dict[str, Any]:
    """The steps in this process."""
    from malmen.training import train

    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run", on_step=lambda _step, _report: ends.append(time.perf_counter()))
    seconds = [after - before for before, after in pairwise(ends)]
    return {
        "seconds_per_step": round(statistics.median(seconds), 3),
        "stages": _median_stages([row["seconds"] for row in run.history[1:]]),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def distributed(config: Config) -> dict[str, Any]:
    """The steps on a local Ray cluster."""
    from malmen.platform.train import train

    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run")
    steps = [row for row in run.history if "wall" in row]
    timed = steps[1:]
    ends = [row for row in run.history if "lm_memory" in row]
    return {
        "seconds_per_step": round(statistics.median(row["wall"] for row in timed), 3),
        "stages": _median_stages([row["seconds"] for row in timed]),
        "mb_moved_per_step": round(statistics.median(row["bytes_moved"] for row in timed) / 2**20, 1),
        "lm_peak_rss_mb": [found["rss"] for found in ends[-1]["lm_memory"]],
        "hypernet_peak_rss_mb": [found["rss"] for found in steps[-1]["hypernet_memory"]],
    }


def _median_stages(rows: list[dict[str, float]]) -> dict[str, float]:
    return {stage: round(statistics.median(row.get(stage, 0.0) for row in rows), 3) for stage in rows[0]}


def _by_round(rounds: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Each way's seconds by those of one process in the same round."""
    if "single" not in rounds[0]:
        return {}
    return {
        way: [round(one[way]["seconds_per_step"] / one["single"]["seconds_per_step"], 3) for one in rounds]
        for way in rounds[0]
    }


def in_a_process(way: str, config: Config) -> dict[str, Any]:
    """One way in a process of its own, so that neither's memory or threads are the other's."""
    command = [sys.executable, __file__, "--way", way, "--config", config.model_dump_json()]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="gpt2")
    parser.add_argument("--edits", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", default="last:6")
    parser.add_argument("--rank", type=int, default=1920)
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--hypernet-rows", type=int, default=4096)
    parser.add_argument("--lm-workers", type=int, default=1)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--sharding", choices=("none", "zero3"), default="none")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        config = Config.model_validate_json(args.config)
        print(json.dumps(single(config) if args.way == "single" else distributed(config)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(args.model, Path(folder) / args.model)
        chosen = {way: make_config(args, model, overlap=way == "with_overlap") for way in args.ways}
        rounds = [{way: in_a_process(way, config) for way, config in chosen.items()} for _ in range(args.rounds)]
    # A machine's speed varies from minute to minute, so the ways take turns, and each is compared with its neighbour.
    best = {way: min((one[way] for one in rounds), key=lambda found: found["seconds_per_step"]) for way in chosen}
    seconds = {way: found["seconds_per_step"] for way, found in best.items()}
    single_too = "single" in seconds
    result = {
        **{key: value for key, value in vars(args).items() if key not in ("way", "config")},
        "gemm_gflops": round(gemm_rate() / 1e9, 1),
        **best,
        "ratio_of_best": {way: round(one / seconds["single"], 3) for way, one in seconds.items()} if single_too else {},
        "ratio_by_round": (by_round := _by_round(rounds)),
        "ratio": {way: round(statistics.median(found), 3) for way, found in by_round.items()},
        "all_seconds_per_step": {way: [one[way]["seconds_per_step"] for one in rounds] for way in chosen},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
