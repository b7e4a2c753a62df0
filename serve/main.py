"""`python -m malmen.serve.main`: `malmen serve` where the command itself is not installed."""

from __future__ import annotations

from malmen.platform.cli.main import add_commands, main
from malmen.serve.cli import app

if __name__ == "__main__":
    add_commands("serve", app)
    main(["serve"])
