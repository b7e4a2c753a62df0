"""The endpoint's service, measured: edits a second, the latency of one edit, what an overlay costs. JSON on stdout.

The service and the reader run in this process, as in the writer's and a reader's; HTTP and Ray are left out of the
latencies (docs/serving.md has those too). GPT-2's shape has random weights: right for time, useless for quality.

    python benchmarks/serve.py --model builtin
    python benchmarks/serve.py --model gpt2 --history 0 1000
    python benchmarks/serve.py --draw docs/serving.png builtin.json gpt2.json   # a picture of what was printed
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from malmen.config import Config
from malmen.data.records import Fact
from malmen.editor import Editor
from malmen.lm.layers import edited_layers
from malmen.lm.model import LanguageModel, encode_batches, load_lm
from malmen.lm.trace import trace
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.messages import Change, Prompt, Sampling, reply_or_raise
from malmen.serve.reading import decoding
from malmen.serve.reading.reader import Reader
from malmen.serve.settings import GuardConfig
from malmen.serve.writing.guards import Guards
from malmen.serve.writing.service import EditService

LOOSE = GuardConfig(min_success=0, max_shift_ratio=1e9, max_perplexity_ratio=1e9)


def make_facts(number: int) -> list[Fact]:
    """Questions of a dozen tokens that nobody asked before."""
    return [
        Fact(f"What is the colour of the house with number {index} in our street?", "green") for index in range(number)
    ]


def build(model: str, folder: Path) -> tuple[EditService, Reader]:
    """A service with an empty ledger, and a reader of its versions."""
    lm = load_lm("builtin")
    if model == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        size = len(lm.tokenizer)
        lm = LanguageModel(GPT2LMHeadModel(GPT2Config(vocab_size=size)).eval(), lm.tokenizer, "decoder")
    config = Config.model_validate({"editor": {"layers": "last:6", "edit_lr": 1e-4}})
    editor = Editor(edited_layers(lm.model, config.editor), config)
    editor.observe(trace(lm, editor.layers, encode_batches(lm, make_facts(64), config), config.editor.tokens))
    blobs = BlobStore(folder / "blobs")
    guards = Guards(lm, LOOSE, make_facts(64), config.batch.token_budget, config.data)
    ledger = Ledger(f"sqlite:///{folder / 'ledger.db'}", lm.fingerprint(), "benchmark")
    return EditService(lm, editor, ledger, blobs, guards), Reader(lm, config, blobs)


def seconds(work: Callable[[], object], times: int) -> dict[str, float]:
    """The median and the extremes of some runs, after one that does not count."""
    work()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


class Facts:
    """Facts that were not used yet."""

    def __init__(self) -> None:
        self.used = 1000

    def take(self, number: int) -> tuple[Fact, ...]:
        self.used += number
        return tuple(Fact(f"What is the colour of the car with the plate {index} out there?", "red")
                     for index in range(self.used - number, self.used))  # fmt: skip


def edit(service: EditService, facts: tuple[Fact, ...]) -> None:
    """One request, which must be accepted."""
    (outcome,) = service.apply([Change("benchmark", facts)])
    reply_or_raise(outcome)


def latencies(service: EditService, facts: Facts, history: list[int], times: int, progress: Progress) -> dict[str, Any]:
    """One edit on a ledger that already holds so many facts."""
    found = {}
    task = progress.add_task("history", total=max(history))
    for size in sorted(history):
        while service.edit_set.num_facts < size:
            edit(service, facts.take(min(250, size - service.edit_set.num_facts)))
            progress.update(task, completed=service.edit_set.num_facts)
        found[str(size)] = seconds(lambda: edit(service, facts.take(1)), times)
    return found


def batches(service: EditService, facts: Facts, sizes: list[int]) -> dict[str, float]:
    """Facts a second, for requests of so many facts."""
    found = {}
    for size in sizes:
        began = time.perf_counter()
        edit(service, facts.take(size))
        found[str(size)] = size / (time.perf_counter() - began)
    return found


def writers(service: EditService, facts: Facts, counts: list[int]) -> dict[str, float]:
    """Edits a second of so many callers at once; what waits while one solve runs shares the next, as in the writer."""
    found = {}
    for count in counts:
        waiting: list[Change] = [Change("benchmark", facts.take(1)) for _ in range(max(count, 8))]
        lock, began = threading.Lock(), time.perf_counter()

        def work(many: int = count, queue: list[Change] = waiting, guard: threading.Lock = lock) -> None:
            while True:
                with guard:
                    some, queue[:] = queue[:many], queue[many:]
                    if not some:
                        return
                    service.apply(some)

        threads = [threading.Thread(target=work) for _ in range(2)]
        number = len(waiting)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[str(count)] = number / (time.perf_counter() - began)
    return found


def reading(service: EditService, reader: Reader, times: int) -> dict[str, Any]:
    """Answers of 16 tokens to 8 prompts at once: unedited, edited, and of two versions mixed.

    No answer ends before, because otherwise one version would have more to do than another.
    """
    decoding.end_tokens = lambda _lm: set()
    versions = [version.shifts for version in service.ledger.versions(2)]
    prompts = [fact.prompt for fact in make_facts(8)]

    def ask(*shifts: str | None) -> float:
        rows = [Prompt(text, shifts[index % len(shifts)], Sampling(16)) for index, text in enumerate(prompts)]
        began = time.perf_counter()
        answers = reader.answer(rows)
        assert all(answer.completion_tokens == 16 for answer in answers)
        return time.perf_counter() - began

    ways = {"unedited": (None,), "edited": (versions[0],), "two versions": tuple(versions)}
    found: dict[str, Any] = {name: [] for name in ways}
    for shifts in ways.values():
        ask(*shifts)
    for _ in range(times):  # in turn, because the machine's speed changes
        for name, shifts in ways.items():
            found[name].append(ask(*shifts))
    medians = {name: statistics.median(runs) for name, runs in found.items()}
    held = reader.memory()
    return {
        "seconds": medians,
        "overhead": {name: medians[name] / medians["unedited"] - 1 for name in ways if name != "unedited"},
        "bytes_per_version": held["bytes"] // max(held["versions"], 1),
    }


LABELS = {"builtin": "built-in model (2M)", "gpt2": "GPT-2's shape (124M)"}


def draw(file: Path, runs: list[dict[str, Any]]) -> None:
    """Three panels: one edit over the history, facts a second over the size of a request, requests over writers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    for place, run in enumerate(runs):
        style: dict[str, Any] = {"color": f"C{place}", "marker": "os"[place % 2], "label": LABELS[run["model"]]}
        found = run["latency_of_one_edit"]
        medians = [row["median"] for row in found.values()]
        spread = [
            [row["median"] - row["least"] for row in found.values()],
            [row["most"] - row["median"] for row in found.values()],
        ]
        panels[0].errorbar(list(map(int, found)), medians, spread, capsize=3, **style)
        for axes, name in ((panels[1], "facts_per_second_by_batch"), (panels[2], "edits_per_second_by_writers")):
            axes.plot(list(map(int, run[name])), list(run[name].values()), **style)
            axes.set_xscale("log")
    texts = (
        ("facts in the ledger", "seconds for one edit (median, least, most)"),
        ("facts in a request", "facts a second"),
        ("single-fact requests merged at a time", "requests a second"),
    )
    for axes, (across, up) in zip(panels, texts, strict=True):
        axes.set_yscale("log")
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["builtin", "gpt2"], default="builtin")
    parser.add_argument("--history", type=int, nargs="+", default=[0, 1000, 4000], help="facts in the ledger")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10, 100, 1000], help="facts in a request")
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 8, 64], help="callers at once")
    parser.add_argument("--times", type=int, default=7, help="runs of each measurement")
    parser.add_argument("--draw", nargs="+", metavar="FILE", help="a picture, then JSON files of earlier runs")
    given = parser.parse_args()
    if given.draw:
        draw(Path(given.draw[0]), [json.loads(Path(name).read_text()) for name in given.draw[1:]])
        return
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        service, reader = build(given.model, Path(folder))
        facts = Facts()
        found = {"model": given.model, "layers": len(service.editor.layers), "threads": torch.get_num_threads()}
        found["latency_of_one_edit"] = latencies(service, facts, given.history, given.times, progress)
        found["facts_per_second_by_batch"] = batches(service, facts, given.batches)
        found["edits_per_second_by_writers"] = writers(service, facts, given.writers)
        found["reading"] = reading(service, reader, given.times)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
