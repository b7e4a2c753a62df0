"""The rivals on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from malmen.data.world import world_records

Malmen = Callable[..., tuple[int, str, str]]


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    file = tmp_path / "facts.jsonl"
    rows = [
        {
            "prompt": record.edit.prompt,
            "answer": record.edit.answer,
            "equivalents": [f.prompt for f in record.equivalents],
        }
        for record in world_records("validation")[:3]
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("method", ["ft", "memit", "memit_history", "alphaedit", "ultraedit", "lora"])
def test_a_rival_edits_without_an_editor(malmen: Malmen, facts: Path, tmp_path: Path, method: str) -> None:
    """The rows name no subject: MEMIT finds it in what the rephrasings share."""
    out = tmp_path / "edit"
    moments = f"baselines.memit.cache_dir={tmp_path / 'moments'}"
    code, said, _ = malmen(
        "edit", "--method", method, "--facts", facts, "--out", out, "--no-generate", "--json", moments
    )
    found = json.loads(said)
    assert code == 0 and found["edits"] == 3
    shifts = load_file(out / "shifts.safetensors")
    assert shifts and all(float(shift.norm()) > 0 for shift in shifts.values())
    if method in ("ft", "ultraedit"):  # the built-in model does not recall facts at its subjects
        assert found["edit_success"] > found["edit_success_before"]
    about = json.loads((out / "edit.json").read_text())["editor"]
    assert about["method"] == method and about["settings"]


def test_a_rival_is_evaluated_with_its_own_settings(malmen: Malmen) -> None:
    code, said, _ = malmen(
        "eval",
        "--method",
        "ft",
        "--edits",
        4,
        "--no-generate",
        "--json",
        "baselines.ft.epochs=1",
        "baselines.ft.lr=1e-9",
    )
    scores = json.loads(said)
    assert code == 0 and scores["edit_success"] == scores["edit_success_before"] and scores["locality_agreement"] == 1


@pytest.mark.slow
def test_eval_in_context_states_how_each_number_was_obtained(malmen: Malmen) -> None:
    command = ("eval", "--method", "ft", "--edits", 3, "--in-context", "--deployed", "baselines.ft.epochs=1")
    code, said, _ = malmen(*command, "--json")
    scores = json.loads(said)
    protocol = scores["protocol"]
    contexts = [f"edit_success_in_context_raw_{context}" for context in ("none", "neutral", "old_answer")]
    assert code == 0 and all(0 <= scores[name + way] <= 1 for name in contexts for way in ("", "_generated", "_before"))
    assert len({protocol[name]["prompt"] for name in contexts}) == 3
    assert protocol["edit_success"]["decoding"] != protocol["edit_success_generated"]["decoding"]
    assert all(scores[name] is not None for name in protocol)
    assert protocol["edit_success_deployed_exact"]["scorer"] != protocol["edit_success_generated"]["scorer"]
    code, said, _ = malmen(*command, "--no-generate")
    words = " ".join(said.split())
    assert code == 0 and "the edits in context" in words and "as deployed" in words
    assert "cut at the end mark" in words and "teacher-forced: the most probable token" in words
    code, said, _ = malmen(*command, "--sets", 2, "--no-generate")
    assert code == 0 and "edit_success_in_context_raw_neutral_exact" in said and "every token is right" in said


def test_retrieval_is_evaluated_by_what_the_model_reads(malmen: Malmen) -> None:
    """Only prompts with the very words of an edit are near here, so rephrasings stay as they were."""
    code, said, _ = malmen(
        "eval", "--method", "retrieval", "--edits", 4, "--no-generate", "--json", "baselines.retrieval.threshold=1"
    )  # fmt: skip
    scores = json.loads(said)
    assert code == 0 and scores["edit_success"] != scores["edit_success_before"] and scores["locality_agreement"] == 1
    assert scores["generalization_success"] == scores["generalization_success_before"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--method", "magic"],
            "unknown method 'magic'; the methods are malmen, mend, rledit, ft, memit, memit_history, alphaedit, "
            "ultraedit, lora, retrieval",
        ),
        (["--method", "retrieval"], "retrieval changes no weights, so there is no edit to save"),
        (["--method", "mend"], "--method mend needs a trained editor"),
        ([], "--method malmen needs a trained editor"),
        (["--editor", "x", "--config", "builtin", "--method", "ft"], "--config and --editor exclude each other"),
        (["--editor", "x", "seed=3"], "brings its own settings"),
        (
            ["--editor", "x", "model.device=cpu", "model.name=y"],
            "except model.device, model.dtype, model.fl",
        ),
        (["--method", "ft", "baselines.ft.epoch=1"], "unknown key 'baselines.ft.epoch'"),
        (["--method", "ft", "--config", "nothing"], "no config 'nothing'"),
    ],
)
def test_wrong_usage_is_told(malmen: Malmen, facts: Path, tmp_path: Path, args: list[str], message: str) -> None:
    code, _, said = malmen("edit", "--facts", facts, "--out", tmp_path / "edit", *args)
    assert code == 2 and message in said
    assert not (tmp_path / "edit").exists()


@pytest.mark.slow
def test_a_trained_editor_may_be_used_on_another_device_or_in_another_type(
    malmen: Malmen, facts: Path, tmp_path: Path
) -> None:
    settings = ("training.steps=1", "training.num_edits=2", "editor.rank=4", "training.eval_edits=2")
    assert malmen("train", "builtin", "--local", "--out", tmp_path / "run", *settings)[0] == 0
    code, _, _ = malmen(
        "edit", "--editor", tmp_path / "run", "--facts", facts, "--out", tmp_path / "edit", "--no-generate",
        "model.device=cpu", "model.dtype=float64",
    )  # fmt: skip
    made = json.loads((tmp_path / "edit" / "edit.json").read_text())["model"]
    assert code == 0 and (made["device"], made["dtype"]) == ("cpu", "float64")
