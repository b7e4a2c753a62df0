"""A meta-training step on the platform beside the same step in one process: seconds, bytes, memory. JSON on stdout.

    python benchmarks/distributed_step.py --model gpt2 --edits 64 [--steps N] [--lm-workers 1] [--actors 1]

Random weights of the named shape, records of the built-in world. One process, the platform, and the platform with
overlap run the same steps on the same data, each in its own processes. They take turns step by step: while one works,
all processes of the others are stopped (SIGSTOP), so that a machine whose speed changes within minutes changes it for
all of them. A step's seconds are those in which its way was running; the first warms up and is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from meta_step import SHAPES, gemm_rate

from malmen.config import Config

WAYS = ("single", "distributed", "with_overlap")
STEP_ENDED = "step ended"


def write_model(name: str, folder: Path) -> Path:
    """A model folder with random weights; the built-in world's tokenizer has few tokens, which every shape holds."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from malmen.data.world import WORLD_MODEL

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


def say_step_ended(*_: Any) -> None:
    """To the process that lets the ways take turns."""
    print(STEP_ENDED, file=sys.__stdout__, flush=True)  # what Ray and DeepSpeed say goes elsewhere


def single(config: Config) -> dict[str, Any]:
    """The steps in this process."""
    from malmen.training import train

    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run", on_step=say_step_ended)
    return {
        "stages": [row["seconds"] for row in run.history[1:]],
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def distributed(config: Config) -> dict[str, Any]:
    """The steps on a local Ray cluster."""
    from malmen.platform.train import Listener, train

    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run", listener=Listener(step=say_step_ended))
    steps = [row for row in run.history if "wall" in row]
    timed = steps[1:]
    ends = [row for row in run.history if "lm_memory" in row]
    return {
        "stages": [row["seconds"] for row in timed],
        "mb_moved_per_step": round(statistics.median(row["bytes_moved"] for row in timed) / 2**20, 1),
        "lm_peak_rss_mb": [found["rss"] for found in ends[-1]["lm_memory"]],
        "hypernet_peak_rss_mb": [found["rss"] for found in steps[-1]["hypernet_memory"]],
    }


def median_stages(rows: list[dict[str, float]], pauses: list[float]) -> dict[str, float]:
    """Seconds by stage. The platform's driver hears of a step's end 0.2 s later at most, so that the pause after it
    falls into a stage of the next one: it is taken out of the stage that is longer than it."""
    for row, pause in zip(rows, pauses, strict=True):
        longest = max(row, key=lambda stage: row[stage])
        if row[longest] > pause:
            row[longest] -= pause
    return {stage: round(statistics.median(row.get(stage, 0.0) for row in rows), 3) for stage in rows[0]}


class Turns:
    """A way in processes of its own, which works only while it has its turn."""

    def __init__(self, way: str, config: Config) -> None:
        command = [sys.executable, __file__, "--way", way, "--config", config.model_dump_json()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.family = psutil.Process(self.process.pid)
        self.seconds: list[float] = []
        self.pauses: list[float] = []  # the one before each step
        self.stopped = time.perf_counter()

    def step(self) -> None:
        """Work until a step has ended."""
        begin = time.perf_counter()
        self._send(signal.SIGCONT)
        for line in self._lines():
            if line == STEP_ENDED:
                self.pauses.append(begin - self.stopped)
                self.seconds.append(time.perf_counter() - begin)
                self._send(signal.SIGSTOP)
                self.stopped = time.perf_counter()
                return
        raise SystemExit(f"{self.process.args} ended early, with exit code {self.process.wait()}")

    def finish(self) -> dict[str, Any]:
        """Work to the end; what it has found. The first step warmed up."""
        self._send(signal.SIGCONT)
        *_, last = self._lines()
        if self.process.wait():
            raise SystemExit(f"{self.process.args} failed")
        found, seconds = dict(json.loads(last)), self.seconds[1:]
        found["stages"] = median_stages(found["stages"], self.pauses[1:])
        return {"seconds_per_step": round(statistics.median(seconds), 3), "all_seconds": seconds, **found}

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self.process.poll() is None:
            self._send(signal.SIGKILL)

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, ""):
            yield line.strip()

    def _send(self, what: signal.Signals) -> None:
        """To every process of the way; those that a first pass let start are met by the second."""
        for _ in range(2):
            with contextlib.suppress(psutil.NoSuchProcess):  # the first of them: there are no others then
                for one in (self.family, *self.family.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.send_signal(what)


def take_turns(chosen: dict[str, Config], steps: int) -> dict[str, dict[str, Any]]:
    """What each way has found."""
    running: dict[str, Turns] = {}
    try:
        for way, config in chosen.items():
            running[way] = Turns(way, config)
            running[way].step()
        for _ in range(steps):
            for turns in running.values():
                turns.step()
        return {way: turns.finish() for way, turns in running.items()}
    finally:
        for turns in running.values():
            turns.end()


def compare(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Each way beside one process: all seconds by all seconds, and by round."""
    if "single" not in rounds[0]:
        return {}
    totals = [{way: sum(found["all_seconds"]) for way, found in one.items()} for one in rounds]
    alone = sum(one["single"] for one in totals)
    return {
        "ratio": {way: round(sum(one[way] for one in totals) / alone, 3) for way in totals[0]},
        "ratio_by_round": {way: [round(one[way] / one["single"], 3) for one in totals] for way in totals[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="gpt2")
    parser.add_argument("--edits", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
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
        rounds = [take_turns(chosen, args.steps) for _ in range(args.rounds)]
    result = {
        **{key: value for key, value in vars(args).items() if key not in ("way", "config")},
        "gemm_gflops": round(gemm_rate() / 1e9, 1),
        **compare(rounds),
        "rounds": rounds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
