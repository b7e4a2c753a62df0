"""The command line in this process: exit codes, messages, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import SMALL

from malmen.data.readers import read_records
from malmen.data.world import world_records
from malmen.runs.checkpoint_lookup import latest_checkpoint

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.slow  # loads models and trains, again and again


def test_train_resumes_and_prints_json(malmen: Run, tmp_path: Path) -> None:
    code, _, _ = malmen("train", "builtin", *SMALL, "--local", "--out", tmp_path / "run")
    assert code == 0
    code, out, _ = malmen("train", "builtin", *SMALL, "--local", "--out", tmp_path / "run", "--resume", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 3
    code, _, err = malmen("train", "builtin", *SMALL, "--local", "--out", tmp_path / "run")
    assert (code, "a finished run of 3 steps" in err) == (1, True)


def test_edit_reports_each_fact_and_generate_shows_before_and_after(
    malmen: Run, trained: Path, facts: Path, tmp_path: Path
) -> None:
    code, out, _ = malmen("edit", "--editor", trained, "--facts", facts, "--out", tmp_path / "edit", "--json")
    assert code == 0
    report = json.loads(out)
    assert [fact["role"] for fact in report["facts"]] == ["edit"] * 3
    assert report["generalization_success"] is None
    prompt = report["facts"][0]["prompt"]
    code, out, _ = malmen("generate", prompt, "--edits", tmp_path / "edit", "--json", "--tokens", 8)
    (answer,) = json.loads(out)
    assert (code, answer["prompt"]) == (0, prompt)
    assert answer["before"].startswith(report["facts"][0]["before"])
    code, out, _ = malmen("edit", "--editor", trained, "--facts", facts, "--out", tmp_path / "edit")
    assert code == 0
    assert "the edits (ES)" in out


def test_eval_takes_the_number_of_edits(malmen: Run, trained: Path) -> None:
    code, out, _ = malmen("eval", "--editor", trained, "--edits", 10, "--json", "--no-generate")
    scores = json.loads(out)
    assert (code, scores["edits"], scores["edit_success_generated"]) == (0, 10, None)
    assert scores["own_raw_kl"] >= 0  # the drift takes a second, and is measured all the same
    code, out, _ = malmen("eval", "--editor", trained, "--edits", 10, "--sets", 3, "--json", "--no-generate")
    found = json.loads(out)
    assert (code, len(found["sets"])) == (0, 3)
    assert found["mean"]["edit_success"] == pytest.approx(sum(row["edit_success"] for row in found["sets"]) / 3)
    code, out, _ = malmen("eval", "--editor", trained, "--edits", 10, "--sets", 2, "--no-generate")
    assert (code, "2 sets of 10 edits" in out) == (0, True)
    code, _, err = malmen("eval", "--editor", trained, "--edits", 100_000)
    assert (code, "only 768 different records" in err) == (1, True)


def test_data_check_names_line_field_and_remedy(malmen: Run, tmp_path: Path, facts: Path) -> None:
    assert malmen("data", "check", facts)[0] == 0
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "Who?", "answer": ""}\n')
    code, out, _ = malmen("data", "check", bad)
    assert (code, "answer" in out, "1" in out) == (1, True, True)
    code, out, _ = malmen("data", "check", bad, "--json")
    assert (code, json.loads(out)["problems"][0]["line"]) == (1, 1)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["train", "gpt3"], 2, "neither a file nor one of those shipped"),
        (["train", "builtin", "editor.rnak=3"], 2, "did you mean editor.rank"),
        (["train", "builtin", "layers=[transformer.h.1.mlp.cproj]"], 2, "transformer.h.1.mlp.c_proj"),
        (["train", "builtin", "layers=last:9"], 2, "has 6 blocks"),
        (["train", "builtin", "model.name=/nowhere/model.gguf"], 1, "does not exist"),
        (["train", "builtin", "data.train=/nowhere.jsonl"], 1, "/nowhere.jsonl"),
        (["train", "builtin", "--out", "/proc/run"], 1, "cannot write to /proc/run"),
        (["edit", "--editor", "/nowhere", "--facts", "/nowhere.jsonl"], 1, "/nowhere.jsonl does not exist"),
        (["eval", "--editor", "/nowhere"], 1, "holds no trained editor"),
        (["generate", "hello", "--edits", "/nowhere"], 1, "holds no edit"),
        (["edit"], 2, "Missing option"),
        (["fly"], 2, "No such command"),
    ],
)
def test_wrong_use_gives_one_clear_message(
    malmen: Run, tmp_path: Path, args: list[str], code: int, message: str
) -> None:
    extra = ["--out", str(tmp_path / "run")] if args[0] in ("train", "edit") and "--out" not in args else []
    found, _, err = malmen(*args, *extra)
    assert found == code
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_run_of_another_config_is_not_gone_on_with(malmen: Run, trained: Path) -> None:
    code, _, err = malmen("train", "builtin", *SMALL, "meta_lr=0.5", "--out", trained)
    assert (code, "Traceback" in err) == (1, False) and "cannot resume" in err and "training.meta_lr" in err


def test_an_edit_without_an_editor_says_what_was_expected(malmen: Run, facts: Path, tmp_path: Path) -> None:
    code, _, err = malmen("edit", "--editor", "/nowhere", "--facts", facts, "--out", tmp_path / "edit")
    assert (code, "/nowhere holds no trained editor" in err) == (1, True)
    assert not (tmp_path / "edit").exists()


def test_contradicting_facts_are_refused(malmen: Run, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text('{"prompt": "Who?", "answer": "A"}\n{"prompt": "Who?", "answer": "B"}\n')
    code, _, err = malmen("edit", "--editor", trained, "--facts", file, "--out", tmp_path / "edit")
    assert (code, "contradict" in err) == (1, True)
    assert not (tmp_path / "edit").exists()


def test_a_truncated_checkpoint_is_one_message(malmen: Run, tmp_path: Path, facts: Path) -> None:
    folder = tmp_path / "run"
    assert malmen("train", "builtin", *SMALL, "--local", "--out", folder, "--json")[0] == 0
    file = latest_checkpoint(folder) / "editor.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    code, _, err = malmen("edit", "--editor", folder, "--facts", facts, "--out", tmp_path / "edit")
    assert (code, "damaged" in err, "Traceback" in err) == (1, True, False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which this system lacks")
def test_a_place_that_cannot_be_written_is_one_message(malmen: Run, trained: Path, facts: Path) -> None:
    code, _, err = malmen("edit", "--editor", trained, "--facts", facts, "--out", "/dev/full/edit")
    assert (code, "Traceback" in err) == (1, False)
    assert "/dev/full" in err


def test_help_names_every_command(malmen: Run) -> None:
    code, out, _ = malmen("--help")
    assert code == 0
    for command in ("train", "edit", "eval", "generate", "quickstart", "data", "world", "configs", "settings"):
        assert command in out
        assert malmen(command, "--help")[0] == 0
    assert malmen("configs")[0] == 0


def test_the_worlds_records_can_be_written_and_edited_from_the_file(malmen: Run, tmp_path: Path) -> None:
    file = tmp_path / "people.jsonl"
    code, out, _ = malmen("world", "records", "--split", "train", "--seed", "7", "--out", file, "--json")
    assert (code, json.loads(out)["records"]) == (0, len(world_records("train")))
    assert read_records(file) == world_records("train", seed=7)
    assert malmen("world", "records", "--split", "test", "--out", tmp_path / "x.jsonl")[0] == 2


def test_help_of_every_command_loads_nothing_heavy() -> None:
    """Help is there at once because it imports only what prints it; seconds would depend on the machine."""
    code = """
import contextlib, io, sys
from typer.main import get_command
from malmen.platform.cli.main import app, add_entry_points

def show(command, path):
    with contextlib.redirect_stdout(io.StringIO()):
        command.main([*path, "--help"], prog_name="malmen", standalone_mode=False)

def walk(command, path):
    show(root, path)
    print(" ".join(["malmen", *path]))
    for name, child in getattr(command, "commands", {}).items():
        walk(child, [*path, name])

add_entry_points()
root = get_command(app)
walk(root, [])
heavy = {"torch", "transformers", "ray", "deepspeed", "mlflow", "fastapi", "datasets", "matplotlib", "optuna"}
print("loaded:", *sorted(heavy & {name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *commands, loaded = done.stdout.splitlines()
    assert {"malmen", "malmen eval", "malmen sweep run", "malmen experiment report", "malmen serve run"} < set(commands)
    assert loaded == "loaded:"


@pytest.mark.deepspeed
def test_deepspeeds_log_does_not_get_into_the_json_of_a_command() -> None:
    """transformers imports it to save a model, and on a machine without a GPU it warns of that."""
    code = """
from malmen.platform.cli.main import _options
_options()
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
get_accelerator()
logger.warning("beware")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, "WARNING DeepSpeed: beware" in done.stderr) == ("", True)
