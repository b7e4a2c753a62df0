from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from malmen.config import Config
from malmen.errors import UsageError
from malmen.tune.cli import load
from malmen.tune.settings import parse_sweep
from malmen.tune.sweep_folder import Judgement, SweepFolder, TrialRecord

Run = Callable[..., tuple[int, str, str]]


def test_settings_come_from_the_config_then_the_space_then_the_command_line(tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("layer_sets: [last:1]\nsettings: {training.steps: 30, training.num_edits: 3}")
    config, sweep = load("builtin", str(space), ["training.num_edits=4", "sweep.trials=2"])
    assert (config.training.steps, config.training.num_edits, sweep.trials) == (30, 4, 2)
    assert config.editor.rank == 256  # the shipped config's
    with pytest.raises(UsageError, match=r"unknown key 'training\.stpes'; did you mean training\.steps"):
        load("builtin", str(space), ["training.stpes=1"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "no config 'nosuch'"),
        (
            ["builtin", "--space", "nosuch"],
            "no space 'nosuch': neither a file nor one of those shipped (builtin, default)",
        ),
        (["builtin", "sweep.trails=3"], "did you mean trials"),
        (["builtin", "sweep.layer_sets=[last:99]"], "layer set 'last:99' of the space does not exist in builtin"),
        (["builtin", "--out", "s3://bucket/sweep"], "a sweep writes to a folder"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(malmen: Run, arguments: list[str], said: str) -> None:
    code, _, err = malmen("sweep", *arguments)
    assert code == 2
    assert said in err and err.startswith("malmen: ") and err.count("\n") == 1


def test_a_report_is_shown_of_a_sweep_that_is_under_way(malmen: Run, tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "sweep")
    folder.begin(Config(), parse_sweep({"layer_sets": ["last:1"]}, "the test"))
    scores = {"edit_success": 0.9, "generalization_success": 0.8, "locality_success": 0.7}
    folder.put(TrialRecord(0, {"layers": "last:1"}, "finished", (Judgement(3, 0.79, scores, 1.0),)))
    folder.put(TrialRecord(1, {"layers": "last:1"}))
    code, out, _ = malmen("sweep", "report", folder.path)
    assert code == 0 and "0.790" in out and "planned" in out
    code, out, _ = malmen("sweep", "report", folder.path, "--json")
    assert code == 0 and json.loads(out)["pareto_front"] == [0]
    assert (folder.path / "report" / "report.html").exists()


def test_a_folder_that_is_no_sweep_has_no_report(malmen: Run, tmp_path: Path) -> None:
    code, _, err = malmen("sweep", "report", tmp_path)
    assert code == 1 and "holds no sweep" in err


def test_every_setting_is_listed_and_malmen_settings_says_where(malmen: Run) -> None:
    code, out, _ = malmen("sweep", "settings", "--json")
    assert code == 0 and {"sweep.trials", "sweep.grace_steps"} <= {row["key"] for row in json.loads(out)}
    code, out, err = malmen("settings", "--json")
    assert code == 0 and "training.steps" in {row["key"] for row in json.loads(out)}
    for group in ("sweep", "experiment", "serve"):
        assert f"`malmen {group} settings`" in err


def test_every_command_has_help(malmen: Run) -> None:
    for arguments in (["sweep", "--help"], ["sweep", "run", "--help"], ["sweep", "report", "--help"]):
        code, out, _ = malmen(*arguments)
        assert code == 0 and "Usage" in out
