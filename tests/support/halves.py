"""`make test`: the tests with Ray and those without, in two processes side by side, because each leaves a core idle.

    python tests/support/halves.py [PYTEST ARGUMENTS]

The tests with Ray print as they run, the others' output follows. Fails if either half does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

NOTHING_COLLECTED = 5


def main(args: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-m", "not chaos", *args]
    with tempfile.TemporaryFile() as told:
        rest = subprocess.Popen([*command, "--half", "rest"], stdout=told, stderr=subprocess.STDOUT)
        try:
            codes = [subprocess.call([*command, "--half", "ray"])]
            codes.append(rest.wait())
        finally:
            rest.kill()
        told.seek(0)
        sys.stdout.buffer.write(told.read())
        sys.stdout.flush()
    ran = [code for code in codes if code != NOTHING_COLLECTED]
    return max(ran, default=NOTHING_COLLECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
