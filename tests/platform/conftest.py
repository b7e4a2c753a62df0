from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from small_runs import SMALL

from malmen.data.world import world_records
from malmen.platform.cli.main import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `malmen train`; nobody changes it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["malmen", "train", "builtin", *SMALL, "--local", "--out", str(folder), "--json"])
        main()
    assert not stop.value.code
    return folder


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    """A file of three facts."""
    file = tmp_path / "facts.jsonl"
    rows = [record.edit for record in world_records("validation")[:3]]
    file.write_text("".join(json.dumps({"prompt": fact.prompt, "answer": fact.answer}) + "\n" for fact in rows))
    return file
