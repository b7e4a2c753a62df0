from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from malmen.config import load_config
from malmen.errors import UsageError
from malmen.methods.registry import METHODS
from malmen.platform.cli.edit import check_method
from malmen.platform.cli.main import app
from malmen.platform.cli.options import shipped_file


def help_of(command: str, parameter: str) -> str:
    """What `malmen COMMAND --help` says of a parameter."""
    commands: dict[str, Any] = dict(getattr(get_command(app), "commands", {}))
    return str(next(given.help for given in commands[command].params if given.name == parameter))


def test_a_file_is_found_by_its_path_before_a_shipped_one_of_that_name(tmp_path: Path) -> None:
    shipped, own = tmp_path / "small.yaml", tmp_path / "own"
    shipped.touch()
    own.touch()
    assert shipped_file(tmp_path, "small", "config") == shipped
    assert shipped_file(tmp_path, str(own), "config") == own
    with pytest.raises(UsageError, match=r"no config 'large': neither a file nor one of those shipped \(small\)"):
        shipped_file(tmp_path, "large", "config")


@pytest.mark.parametrize("command", ["edit", "eval", "capacity"])
def test_settings_that_the_help_names_are_accepted(command: str) -> None:
    examples = re.findall(r"[a-z]+(?:\.[a-z0-9_]+)+=\w*", help_of(command, "overrides"))
    placement = [example for example in examples if example.startswith("model.")]
    others = [example for example in examples if example not in placement]
    assert placement == ["model.device=", "model.dtype=", "model.float32_products="]
    check_method(None, "RUN", None, placement)
    assert bool(others) == (command != "capacity")  # which has no --method
    check_method("ft", None, None, others)
    load_config(None, others)


def test_a_command_offers_the_methods_that_it_takes() -> None:
    untrained = {name for name, method in METHODS.items() if not method.trained}
    for command, wanted in (("edit", {name for name in untrained if METHODS[name].weights}), ("eval", untrained)):
        offered = help_of(command, "method").partition(" need no --editor")[0]
        assert set(offered.split(", ")) == wanted
