"""The service and the readers, built from settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from endpoints import save_editor, world_facts

from malmen.config import Config
from malmen.errors import EditError
from malmen.runs.checkpoint_lookup import latest_checkpoint
from malmen.serve.assembly import build_reader, load_probes
from malmen.serve.settings import ServeConfig


def test_probes_come_from_the_configured_file_and_no_more_than_asked_for(tmp_path: Path) -> None:
    facts = world_facts(5)
    file = tmp_path / "probes.jsonl"
    file.write_text("".join(json.dumps({"prompt": fact.prompt, "answer": fact.answer}) + "\n" for fact in facts))
    settings = ServeConfig.model_validate({"editor": "", "guard": {"probes": str(file), "num_probes": 3}})
    assert load_probes(settings, Config()) == facts[:3]


def test_without_a_file_the_probes_are_unrelated_facts_of_the_editors_data() -> None:
    settings = ServeConfig.model_validate({"editor": "", "guard": {"num_probes": 4}})
    probes = load_probes(settings, Config())
    assert len(set(probes)) == 4
    nowhere = Config.model_validate({"data": {"validation": "nowhere.jsonl", "train": "nowhere.jsonl"}})
    with pytest.raises(EditError, match=r"(?s)the guard has no probes.*guard\.probes="):
        load_probes(settings, nowhere)


def test_a_reader_refuses_an_editor_of_another_base_model(tmp_path: Path) -> None:
    run = save_editor(tmp_path / "run")
    state = Path(latest_checkpoint(run)) / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "base_model": "another"}))
    with pytest.raises(EditError, match="belongs to base model another"):
        build_reader(ServeConfig(editor=str(run), store=str(tmp_path / "store")))
