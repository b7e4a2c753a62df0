"""Peak memory of one meta-training step over the number of edits, each in a process of its own. JSON on stdout."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

# glibc keeps freed blocks below a threshold that it raises as it goes; with a fixed one they go back to the system, and
# the peak is that of what is really held.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--edits", type=int, nargs="+", default=[32, 128, 512, 2048])
    parser.add_argument("--rank", type=int, default=1920)
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--hypernet-rows", type=int, default=1024)
    args = parser.parse_args()
    rows = []
    for edits in args.edits:
        command = [
            sys.executable, str(Path(__file__).with_name("meta_step.py")), "--model", args.model, "--edits", str(edits),
            "--rank", str(args.rank), "--steps", "0", "--token-budget", str(args.token_budget),
            "--hypernet-rows", str(args.hypernet_rows),
        ]  # fmt: skip
        found = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | ALLOCATOR).stdout
        )
        rows.append({key: found[key] for key in ("edits", "answer_tokens", "peak_rss_mb", "seconds_per_step")})
    print(json.dumps({"model": args.model, "rank": args.rank, "rows": rows}))


if __name__ == "__main__":
    main()
