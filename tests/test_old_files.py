"""Folders that an earlier version wrote still load, and unfinished work in them ends as it would have there."""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from malmen.config import Config
from malmen.data.readers import read_records
from malmen.editor import Editor
from malmen.lm.model import LanguageModel, load_lm
from malmen.runs.checkpoint import load_edit
from malmen.runs.checkpoint_lookup import read_config
from malmen.training import train

ARCHIVE = Path(__file__).parent / "support" / "written_before" / "0f6b2bd.tar.xz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A fresh copy of the folders: some tests go on with them."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load_lm("builtin")


def with_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"training": config.training.model_copy(update={"steps": steps})})


def test_an_old_editor_makes_the_edit_that_it_made(old: Path, lm: LanguageModel) -> None:
    facts = [record.edit for record in read_records(old / "facts.jsonl", "auto")]
    shifts, manifest = load_edit(old / "edit", lm)
    edit = Editor.from_pretrained(old / "editor", lm).edit(lm, facts)
    assert manifest["facts"] == [asdict(fact) for fact in facts]
    assert shifts.keys() == edit.shifts.keys() and shifts
    for name, shift in shifts.items():
        assert_close(edit.shifts[name].float(), shift, rtol=1e-3, atol=1e-5)  # float32, and another CPU may round anew


def test_an_old_run_is_resumed_to_the_editor_that_it_would_have_become(old: Path, lm: LanguageModel) -> None:
    six = load_file(old / "six" / "editor.safetensors")
    four = load_file(old / "platform" / "checkpoint-0000004" / "editor.safetensors")
    run = train(with_steps(read_config(old / "platform"), 6), old / "platform", lm=lm)
    rounding = {"rtol": 1e-2, "atol": 1e-4}  # float32 over six steps of Adam, a tenth of one of its steps
    assert_close(dict(run.editor.state_dict()), six, **rounding)
    with pytest.raises(AssertionError):  # the θ before the last two steps is further away than that
        assert_close(four, six, **rounding)
    assert [row["step"] for row in run.history if "meta_loss" in row] == [1, 2, 3, 4, 5, 6]


def test_an_old_store_holds_its_facts_and_takes_new_ones(old: Path) -> None:
    from malmen.serve.assembly import build_service
    from malmen.serve.ledger.opening import pin_editor
    from malmen.serve.messages import Change
    from malmen.serve.settings import GuardConfig, ServeConfig

    lenient = GuardConfig(min_success=0, max_shift_ratio=1e9, max_perplexity_ratio=1e9)
    settings = pin_editor(ServeConfig(editor=str(old / "editor"), store=str(old / "store"), guard=lenient))
    service = build_service(settings)
    live = service.ledger.resolve("live")
    members = service.ledger.members(live.id)
    assert (live.number, len(members)) == (3, 4)
    assert service.ledger.verify()["intact"] is True
    assert live.shifts is not None
    stored, solved = service.blobs.get(live.shifts), service.edit_set.shifts()
    assert stored.keys() == solved.keys() and stored
    for name, shift in stored.items():
        assert_close(solved[name].float(), shift.float(), rtol=1e-4, atol=1e-6)
    service.apply([Change("test", remove=tuple(sorted(members)))])
    assert service.edit_set.shifts() == {}
    service.ledger.close()


@pytest.mark.ray
@pytest.mark.slow  # one trial more
@pytest.mark.usefixtures("ray_cluster")
def test_an_old_sweep_is_resumed_with_the_trial_that_it_would_have_drawn(old: Path) -> None:
    from malmen.tune.sweep import sweep
    from malmen.tune.sweep_folder import SweepFolder

    folder = SweepFolder(old / "sweep")
    (first,) = folder.trials()
    config, space, _ = folder.load()
    sweep(config, space.model_copy(update={"trials": 2}), folder.path)
    trials = folder.trials()
    expected = json.loads((old / "next-trial.json").read_text())
    assert trials[0] == first
    assert (trials[1].number, trials[1].params, trials[1].status) == (1, expected["params"], "finished")
    assert torch.isfinite(torch.tensor(trials[1].judgements[-1].score))
