"""Peak memory of one meta-training step over the number of edits: decomposed, and as one graph (the paper's Fig. 10).

Every measurement has a process of its own, `python -m malmen.tune.experiments.memory`: a peak never goes down.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from malmen.config import Config, parse_config

WAYS = {"decomposed": "LM and hyper-network apart (MALMEN)", "concatenated": "one graph (MEND-style)"}
_LIMIT_SECONDS = 1200
_BATCHES = {"token_budget": 512, "hypernet_rows": 512, "cache_mb": 0}  # of the decomposed step, for any number of edits
# glibc keeps freed blocks below a threshold that it raises as it goes; with a fixed one they go back to the system.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


def measure_memory(config: Config, way: str, edits: int, seed: int, limit_gb: float) -> dict[str, Any]:
    """The peak of a step and the memory before it, in MB; or `ran_out`, or an `error`."""
    raw = config.model_dump(mode="json") | {"seed": seed}
    raw["model"]["device"] = "cpu"  # the peak of a process does not count a GPU's memory
    raw["batch"] |= _BATCHES
    # Exactly this number: a preset may draw the number of edits anew for each step.
    raw["training"] |= {"num_edits": edits, "min_edits": None}
    request = json.dumps({"config": raw, "way": way, "limit_gb": limit_gb})
    command = [sys.executable, "-m", "malmen.tune.experiments.memory"]
    row: dict[str, Any] = {"way": way, "edits": edits, "seed": seed}
    environment = {**os.environ, **_ALLOCATOR}
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, env=environment, timeout=_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"took more than {_LIMIT_SECONDS} s"}
    if done.returncode == 0:
        return row | json.loads(done.stdout.splitlines()[-1])
    if "can't allocate memory" in done.stderr or "MemoryError" in done.stderr:
        return row | {"ran_out": limit_gb}
    # A machine with less memory than the limit ends the process by a signal, which says nothing about the step.
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode} and no message"])[-1]
    return row | {"error": last}


def _step(config: Config, way: str) -> dict[str, Any]:
    from malmen.data.sampling import Sampler
    from malmen.data.splits import training_records
    from malmen.lm.model import fact_encoder, load_lm
    from malmen.meta import meta_step
    from malmen.methods.concatenated import concatenated_backward
    from malmen.training import make_editor

    lm = load_lm(config.model)
    editor = make_editor(lm, config)
    batch = Sampler(config, fact_encoder(lm, config.data), training_records(config)).batch(0)
    assert len(batch.edits) == config.training.num_edits, (len(batch.edits), config.training.num_edits)
    with suppress(OSError):  # loading the model has raised the peak: reset it where the system can
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_mb()
    if way == "decomposed":
        meta_step(lm, editor, batch)
    else:
        concatenated_backward(lm, editor, batch)
        editor.step()
    return {"peak_mb": _peak_mb(), "before_mb": before}


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(match[1]) / 1024
    from malmen.lm.devices import peak_memory_mb

    return peak_memory_mb()["rss"]


def _main() -> None:
    request = json.load(sys.stdin)
    # Before the limit: libraries take address space that is no memory, and their imports fail in words of their own.
    for module in ("malmen.methods.concatenated", "malmen.meta", "malmen.training"):
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    room = pages * resource.getpagesize() + int(request["limit_gb"] * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    print(json.dumps(_step(parse_config(request["config"], "the config"), request["way"])))


if __name__ == "__main__":
    _main()
