"""Peak memory of one meta-training step over the number of edits, three ways. JSON on stdout, a picture with --plot.

    python benchmarks/memory.py [--edits 32 128 512 2048] [--ways single roles concatenated] [--plot FILE.png]

- single: `malmen.meta.meta_step` in one process;
- roles: one step on the platform, one LM worker and one hypernet actor, each process by itself; also without the shared
  memory of Ray's object store;
- concatenated: the same step as MEND would do it, the hyper-network and the language model in one graph that autograd
  goes back through: same shifts, same gradient, no batches.

Random weights of the named shape; lengths as in zsRE. Every measurement has a process of its own, which may take
--limit GB of address space and then counts as having run out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

from distributed_step import write_model
from meta_step import SHAPES, make_step

# glibc keeps freed blocks below a threshold that it raises as it goes; with a fixed one they go back to the system, and
# the peak is that of what is really held.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
WAYS = ("single", "roles", "concatenated")


def write_records(file: Path, number: int) -> None:
    """Records of random words of the built-in world's tokenizer, about as long as zsRE's."""
    from transformers import AutoTokenizer

    from malmen.data.world import WORLD_MODEL

    rng, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(WORLD_MODEL)

    def fact(length: int) -> dict[str, str]:
        ids = [rng.randrange(300, len(tokenizer)) for _ in range(length)]
        return {"prompt": tokenizer.decode(ids[:-3]).strip(), "answer": tokenizer.decode(ids[-3:]).strip()}

    rows = [{**fact(12), "equivalents": [fact(12)], "unrelated": [fact(14)]} for _ in range(number)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_config(args: argparse.Namespace, **more: Any) -> Any:
    """The paper's hyper-network at fixed batch sizes."""
    from malmen.config import Config

    raw = {
        "editor": {"layers": args.layers, "rank": args.rank},
        "batch": {"token_budget": args.token_budget, "hypernet_rows": args.hypernet_rows, "cache_mb": 0},
        "tracking": {"enabled": False},
    }
    return Config.model_validate(raw | more)


def measure_single(args: argparse.Namespace) -> dict[str, Any]:
    """One process, LM and hyper-network back-propagated one after the other."""
    from malmen.meta import meta_step

    lm, editor, batch = _parts(args)
    meta_step(lm, editor, batch)
    return {"peak_rss_mb": {"process": _peak_mb()}, "answer_tokens": sum(len(fact.targets) for fact in batch.edits)}


def measure_roles(args: argparse.Namespace) -> dict[str, Any]:
    """One step on a local Ray cluster."""
    from malmen.platform.train import train

    with tempfile.TemporaryDirectory() as folder:
        write_records(Path(folder) / "records.jsonl", args.edits[0])
        model = write_model(args.model, Path(folder) / args.model)
        data = {name: str(Path(folder) / "records.jsonl") for name in ("train", "validation")}
        config = make_config(
            args,
            model={"name": str(model), "dtype": "float32"},
            training={"num_edits": args.edits[0], "steps": 1, "eval_edits": 2},
            data=data,
        )
        with watched({"LM worker": "RayTrainWorker", "hypernet actor": "HypernetActor"}) as unshared:
            history = train(config, Path(folder) / "run").history
    (step,) = [row for row in history if "hypernet_memory" in row]
    lm_memory = [row for row in history if "lm_memory" in row][-1]["lm_memory"]
    resident = {"LM worker": lm_memory[0]["rss"], "hypernet actor": step["hypernet_memory"][0]["rss"]}
    return {"peak_rss_mb": resident, "peak_unshared_mb": unshared}


@contextmanager
def watched(titles: dict[str, str], seconds: float = 0.02) -> Iterator[dict[str, int]]:
    """By role, the most memory in MB that a process of its title holds inside, without the pages of Ray's object store
    that it has touched: those are shared, and stay with a process after the objects are gone."""
    peaks: dict[str, int] = {}
    over = Event()

    def watch() -> None:
        places: dict[Path, str] = {}
        for turn in count():
            if turn % 50 == 0:
                lines = {file.parent: _read(file) for file in Path("/proc").glob("[0-9]*/cmdline")}
                places = {pid: role for role, title in titles.items() for pid, line in lines.items() if title in line}
            for process, role in places.items():
                fields = dict(re.findall(r"(Rss\w+):\s+(\d+) kB", _read(process / "status")))
                held = sum(int(fields.get(name, 0)) for name in ("RssAnon", "RssFile"))
                peaks[role] = max(peaks.get(role, 0), held // 1024)
            if over.wait(seconds):
                return

    thread = Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _read(file: Path) -> str:
    """Its text; nothing if the process has ended."""
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def measure_concatenated(args: argparse.Namespace) -> dict[str, Any]:
    """One graph: hyper-network, normal equation, edited LM, and autograd through all of it."""
    from malmen.methods.concatenated import concatenated_backward

    lm, editor, batch = _parts(args)
    concatenated_backward(lm, editor, batch)
    editor.step()
    return {"peak_rss_mb": {"process": _peak_mb()}}


def _parts(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from malmen.editor import Editor
    from malmen.lm.layers import find_layers
    from malmen.lm.model import LanguageModel

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[args.model]())
    lm = LanguageModel(model, None, "decoder")
    drawn = argparse.Namespace(edits=args.edits[0], rows=None)
    batch = make_step(drawn, int(model.config.vocab_size), 0)
    return lm, Editor(find_layers(lm.model, args.layers), make_config(args)), batch


def _peak_mb() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def in_a_process(args: argparse.Namespace, way: str, edits: int) -> dict[str, Any]:
    """One measurement in a process of its own; without memory it says so."""
    options = ["--model", args.model, "--layers", args.layers, "--limit", str(args.limit)]
    for name in ("rank", "token_budget", "hypernet_rows"):
        options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command = [sys.executable, __file__, "--one", way, "--edits", str(edits), *options]
    begin = time.perf_counter()
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | ALLOCATOR)
    row: dict[str, Any] = {"way": way, "edits": edits, "seconds": round(time.perf_counter() - begin)}
    if found.returncode == 0:
        return row | json.loads(found.stdout.splitlines()[-1])
    if "can't allocate memory" in found.stderr or "MemoryError" in found.stderr:
        return row | {"ran_out": f"of {args.limit:g} GB"}
    sys.exit(found.stderr)


def plot(rows: list[dict[str, Any]], limit: float, file: Path) -> None:
    """Peaks over edits, one line for each process of each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for process, peak in row.get("peak_rss_mb", {}).items():
            name = row["way"] if process == "process" else f"{row['way']}: {process}"
            lines.setdefault(name, []).append((row["edits"], peak / 1024))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    for row in rows:
        if "ran_out" in row:
            axes.plot(row["edits"], limit, marker="x", color="black", markersize=10)
            text, where = f"{row['way']} ran out", (row["edits"], limit)
            axes.annotate(text, where, (-10, 0), textcoords="offset points", ha="right", va="center")
    axes.set(xscale="log", xlabel="edits in one step", ylabel="peak memory of a process, GB", ylim=(0, None))
    ticks = sorted({row["edits"] for row in rows})
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="gpt2")
    parser.add_argument("--edits", type=int, nargs="+", default=[32, 128, 512, 2048])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layers", default="last:6")
    parser.add_argument("--rank", type=int, default=1920)
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--hypernet-rows", type=int, default=1024)
    parser.add_argument("--limit", type=float, default=16, help="GB that `concatenated` may take")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if args.one == "concatenated":
            resource.setrlimit(resource.RLIMIT_AS, (int(args.limit * 2**30), int(args.limit * 2**30)))
        measure = {"single": measure_single, "roles": measure_roles, "concatenated": measure_concatenated}[args.one]
        print(json.dumps(measure(args)))
        return
    rows = []
    for way in args.ways:
        for edits in args.edits:
            rows.append(in_a_process(args, way, edits))
            print(json.dumps(rows[-1]), file=sys.stderr)
    if args.plot:
        plot(rows, args.limit, args.plot)
    print(json.dumps({"model": args.model, "rank": args.rank, "limit_gb": args.limit, "rows": rows}))


if __name__ == "__main__":
    main()
