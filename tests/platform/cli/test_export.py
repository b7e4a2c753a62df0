"""`malmen export`: an edit of the command line for those who do not have malmen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from endpoints import untrained_editor, world_facts
from exports import verified_manifest

from malmen.config import ModelConfig
from malmen.lm.model import load_lm
from malmen.runs.checkpoint import save_edit

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def edit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `malmen edit` writes it."""
    lm, facts = load_lm("builtin"), world_facts(2)
    manifest = {
        "base_model": lm.fingerprint(),
        "model": ModelConfig(name="builtin").model_dump(mode="json"),
        "facts": [vars(fact) for fact in facts],
    }
    folder = tmp_path_factory.mktemp("edit") / "edit"
    save_edit(folder, untrained_editor(lm).edit(lm, facts).shifts, manifest)
    return folder


@pytest.mark.parametrize("kind", ["delta", "lora", "merged"])
def test_an_edit_is_exported_whole(malmen: Run, edit: Path, tmp_path: Path, kind: str) -> None:
    code, out, err = malmen("export", "--edits", edit, "--kind", kind, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["kind"] == kind and verified_manifest(tmp_path / "out")["kind"] == kind
    if kind == "lora":
        assert all(one["relative_error"] < 1e-6 for one in found["tensors"].values())


@pytest.mark.parametrize(
    ("args", "code"),
    [(["--edits", "nowhere", "--kind", "delta"], 1), (["--edits", "EDIT", "--kind", "zip"], 2)],
)
def test_what_cannot_be_exported_is_told(malmen: Run, edit: Path, tmp_path: Path, args: list[str], code: int) -> None:
    given = [str(edit) if arg == "EDIT" else arg for arg in args]
    found, _, err = malmen("export", *given, "--out", tmp_path / "out")
    assert found == code and "Traceback" not in err and not (tmp_path / "out").exists()
