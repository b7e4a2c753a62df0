"""`python -m malmen.serve.main`: `malmen serve` where the command itself is not installed."""

from __future__ import annotations


def main() -> None:
    """`malmen serve …`."""
    from malmen.platform.cli.main import add_commands
    from malmen.platform.cli.main import main as malmen
    from malmen.serve.cli import app

    add_commands("serve", app)
    malmen(["serve"])


if __name__ == "__main__":
    main()
