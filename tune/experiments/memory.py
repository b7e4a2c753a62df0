"""Peak memory of one meta-training step over the number of edits: decomposed, and as one graph (the paper's Fig. 10).

Every measurement has a process of its own, because a peak never goes down: `python -m malmen.tune.experiments.memory`.
"""

from __future__ import annotations

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
_BATCHES = {"token_budget": 512, "hypernet_rows": 512, "cache_mb": 0}  # of the decomposed step, whatever the edits
# glibc keeps freed blocks below a threshold that it raises as it goes; with a fixed one they go back to the system.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


def measure_memory(config: Config, way: str, edits: int, seed: int, limit_gb: float) -> dict[str, Any]:
    """The peak of a step in MB, what the process held before it, or that it ran out."""
    raw = config.model_dump(mode="json") | {"seed": seed}
    raw["model"]["device"] = "cpu"  # a process's peak says nothing of a GPU's memory
    raw["batch"] |= _BATCHES
    asked = json.dumps({"config": raw, "way": way, "edits": edits, "limit_gb": limit_gb})
    command = [sys.executable, "-m", "malmen.tune.experiments.memory"]
    row: dict[str, Any] = {"way": way, "edits": edits, "seed": seed}
    environment = {**os.environ, **_ALLOCATOR}
    try:
        found = subprocess.run(
            command, input=asked, capture_output=True, text=True, env=environment, timeout=_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"took more than {_LIMIT_SECONDS} s"}
    if found.returncode == 0:
        return row | json.loads(found.stdout.splitlines()[-1])
    if "can't allocate memory" in found.stderr or "MemoryError" in found.stderr:
        return row | {"ran_out": limit_gb}
    # A signal may come from a machine that has less than the limit, which says nothing of the step.
    last = (found.stderr.strip().splitlines() or [f"ended with {found.returncode} and no message"])[-1]
    return row | {"error": last}


def _step(config: Config, way: str, edits: int) -> dict[str, Any]:
    from malmen.data.sampling import Sampler
    from malmen.data.splits import training_records
    from malmen.lm.model import fact_encoder, load_lm
    from malmen.meta import meta_step
    from malmen.methods.concatenated import concatenated_backward
    from malmen.training import make_editor

    # Exactly so many: a preset's editors are trained with different numbers.
    changed = config.training.model_copy(update={"num_edits": edits, "min_edits": None})
    sized = config.model_copy(update={"training": changed})
    lm = load_lm(sized.model)
    editor = make_editor(lm, sized)
    batch = Sampler(sized, fact_encoder(lm, sized.data), training_records(sized)).batch(0)
    assert len(batch.edits) == edits, (len(batch.edits), edits)
    before = _forget_peak()
    if way == "decomposed":
        meta_step(lm, editor, batch)
    else:
        concatenated_backward(lm, editor, batch)
        editor.step()
    return {"peak_mb": _peak_mb(), "before_mb": before}


def _forget_peak() -> float:
    """Begin the peak anew, where the system can: loading a model takes more for a moment. What is held now, in MB."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb()


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if found:
            return int(found[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def _main() -> None:
    asked = json.load(sys.stdin)
    size = int(asked["limit_gb"] * 2**30)
    import torch  # its libraries take address space that is no memory: the limit begins here

    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    room = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    print(json.dumps(_step(parse_config(asked["config"], "the config"), asked["way"], asked["edits"])))


if __name__ == "__main__":
    _main()
