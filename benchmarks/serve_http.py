"""The endpoint over HTTP, on Ray Serve: edits a second by concurrent writers, answers a second before and after edits.

Starts `malmen serve` on the built-in model with an editor that was not trained (right for time, not for quality), sends
single facts from 1, 8 and 64 clients at once, then asks from 8 clients. JSON on stdout.

    python benchmarks/serve_http.py [--writers 1 8 64] [--seconds 15]
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from malmen.data.records import Fact

LOOSE = ("guard.min_success=0", "guard.max_shift_ratio=1e9", "guard.max_perplexity_ratio=1e9",
         "limits.requests_per_minute=1000000", "writer.cpus=0.1", "reader.cpus=0.1")  # fmt: skip


def make_facts(number: int) -> list[Fact]:
    """Questions of a dozen tokens."""
    return [Fact(f"What is the colour of the house with number {at} in our street?", "green") for at in range(number)]


def save_untrained(folder: Path) -> Path:
    """An editor whose hyper-network is the identity, with its normalisers set."""
    from malmen.config import Config
    from malmen.editor import Editor
    from malmen.lm.layers import edited_layers
    from malmen.lm.model import encode_batches, load_lm
    from malmen.lm.trace import trace
    from malmen.runs.checkpoint import save_checkpoint

    lm, config = load_lm("builtin"), Config.model_validate({"editor": {"layers": "last:3", "edit_lr": 1e-4, "rank": 8}})
    editor = Editor(edited_layers(lm.model, config.editor), config)
    editor.observe(trace(lm, editor.layers, encode_batches(lm, make_facts(64), config), config.editor.tokens))
    save_checkpoint(folder, editor, lm.fingerprint())
    return folder


def at_once(number: int, seconds: float, work: Callable[[], None]) -> dict[str, float]:
    """Do something again and again in so many threads; how often a second, and how long each took."""
    taken: list[float] = []
    ends = time.monotonic() + seconds

    def again() -> None:
        while time.monotonic() < ends:
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)

    threads = [threading.Thread(target=again) for _ in range(number)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = time.perf_counter() - began
    ordered = sorted(taken)
    return {
        "per_second": len(taken) / whole,
        "median_seconds": statistics.median(ordered),
        "p95_seconds": ordered[int(0.95 * (len(ordered) - 1))],
    }


def measure(client: httpx.Client, given: argparse.Namespace) -> dict[str, Any]:
    def edit() -> None:
        fact = {"prompt": f"What is the colour of the thing {uuid.uuid4().hex[:8]} over there?", "answer": "red"}
        client.post("/v1/edits", json={"facts": [fact]}).raise_for_status()

    def ask(model: str) -> Callable[[], None]:
        asked = {"model": model, "prompt": make_facts(1)[0].prompt, "max_tokens": 16}
        return lambda: (client.post("/v1/completions", json=asked).raise_for_status(), None)[1]

    edit()
    found: dict[str, Any] = {"edits": {str(some): at_once(some, given.seconds, edit) for some in given.writers}}
    found["facts_at_the_end"] = client.get("/v1/status").json()["live"]["num_facts"]
    for model in ("base", "live"):
        at_once(8, 2, ask(model))
    rounds = [{model: at_once(8, given.seconds / 3, ask(model)) for model in ("base", "live")} for _ in range(3)]
    found["answers"] = {
        model: {name: statistics.median(one[model][name] for one in rounds) for name in rounds[0][model]}
        for model in ("base", "live")
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 8, 64], help="clients that edit at once")
    parser.add_argument("--seconds", type=float, default=15, help="of each measurement")
    given = parser.parse_args()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        store, run = Path(place) / "store", save_untrained(Path(place) / "run")
        command = [sys.executable, "-m", "malmen.serve.main", "--editor", run, "--store", store, "--port", port, *LOOSE]
        with open(Path(place) / "log", "wb") as log:
            process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, Path(place) / "log")
            token = yaml.safe_load((store / "tokens.yaml").read_text())["admin"]["token"]
            limits = httpx.Limits(max_connections=100)
            headers = {"Authorization": f"Bearer {token}"}
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120, limits=limits
            ) as client:
                print(json.dumps(measure(client, given), indent=1))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Two minutes at most."""
    ends = time.monotonic() + 120
    while time.monotonic() < ends and process.poll() is None:
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    sys.exit(f"the endpoint did not come up:\n{log.read_text(errors='replace')[-2000:]}")


if __name__ == "__main__":
    main()
