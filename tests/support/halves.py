"""`make test`: the tests with Ray and those without, in two processes side by side, because each leaves a core idle.

    python tests/support/halves.py [PYTEST ARGUMENTS]

The tests with Ray print as they run, the others' output follows. Fails if either half does.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile

NOTHING_COLLECTED = 5
ALONE = ("--pdb", "--lf", "--last-failed", "--ff", "--failed-first", "--sw", "--stepwise", "--junit", "--half")


def main(args: list[str]) -> int:
    """The exit code of both."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    slowest = ["--durations", "12", "--durations-min", "5"]  # told at each run: together they have 12 minutes
    command = [sys.executable, "-m", "pytest", "-m", "not chaos", *slowest, *args]
    if any(arg.startswith(ALONE) for arg in args):  # these need one terminal, or one list of what failed
        return subprocess.call(command)
    with tempfile.TemporaryFile() as told:
        ray = subprocess.Popen([*command, "--half", "ray"])
        quiet = {"stdin": subprocess.DEVNULL, "stdout": told, "stderr": subprocess.STDOUT}
        rest = subprocess.Popen([*command, "--half", "rest", "-o", "cache_dir=.pytest_cache/rest"], **quiet)
        try:
            codes = [ray.wait(), rest.wait()]
        finally:
            for half in (ray, rest):
                end(half)
            told.seek(0)
            sys.stdout.buffer.write(told.read())
            sys.stdout.flush()
    return exit_code(codes)


def end(half: subprocess.Popen[bytes]) -> None:
    """After Ctrl-C it ends by itself, after some seconds by force."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        half.wait(10)
    half.kill()


def exit_code(codes: list[int]) -> int:
    """The first that is not well; a half that a signal ended is not. No tests in one half is well, in both is not."""
    ran = [128 - code if code < 0 else code for code in codes if code != NOTHING_COLLECTED]
    return next((code for code in ran if code), 0) if ran else NOTHING_COLLECTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
