"""The experiments, small, on the tests' Ray: every number is there, a killed run goes on, a failure is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from malmen.errors import EditError, UsageError
from malmen.methods.registry import METHODS
from malmen.tune.experiments import work
from malmen.tune.experiments.cells import Group
from malmen.tune.experiments.report import write_report
from malmen.tune.experiments.runner import run_experiments
from malmen.tune.experiments.settings import ExperimentConfig
from malmen.tune.follow import ProgressListener


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_all_experiments_give_numbers_pictures_and_a_page_and_nothing_is_done_twice(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    folder, heard = tmp_path / "experiment", []
    listener = ProgressListener(lambda done, total: heard.append((done, total)))
    kinds = ("scaling", "ablation", "cancellation", "rounds", "failures")
    written = run_experiments(settings, kinds, folder, listener=listener)
    assert [path.stem for path in written] == sorted(kinds) and heard[-1][0] == heard[-1][1] > 20
    scaling = json.loads((folder / "results" / "scaling.json").read_text())
    assert {(row["variant"], row["edits"]) for row in scaling["rows"]} == {
        (method, edits) for method in METHODS for edits in (2, 4)
    }
    for row in scaling["rows"]:
        assert row["seeds"] == 2 and len(row["edit_success"]["values"]) == 2 and row["errors"] == []
        assert 0 <= row["locality_agreement"]["mean"] <= 1
    ablation = json.loads((folder / "results" / "ablation.json").read_text())["rows"]
    assert [row["variant"] for row in ablation] == ["sum", "no_regularisation", "malmen"]
    residuals = json.loads((folder / "results" / "cancellation.json").read_text())["rows"]
    summed = next(row for row in ablation if row["variant"] == "sum")  # the same editor, and not trained again
    same = next(row for row in residuals if (row["variant"], row["edits"]) == ("sum_answer", 4))
    assert summed["errors"] == [] and summed["edit_success"] == same["edit_success"]
    failed = next(row for row in ablation if row["variant"] == "no_regularisation")
    assert failed["seeds"] == 2 or "damping 0 is not positive definite" in failed["errors"][0]
    assert all(row["mean_residual"]["mean"] > 0 for row in residuals)
    page = write_report(folder).read_text()
    assert page.count("data:image/svg+xml") == 4 and not re.search(r"(src|href)=\"http", page)

    good = [path for path in (folder / "cells").iterdir() if "error" not in json.loads(path.read_text())]
    cells = {path: path.stat().st_mtime_ns for path in good}
    (folder / "cells" / "ft-seed1-4.json").unlink()  # as if it had been killed there
    run_experiments(settings, kinds, folder)
    after = {path: path.stat().st_mtime_ns for path in good}
    assert {path.name for path in cells if cells[path] != after[path]} == {"ft-seed1-4.json"}
    elsewhere = settings.model_copy(update={"cpus": 0.5, "settings": {**settings.settings, "batch.cache_mb": 5}})
    run_experiments(elsewhere, ("scaling",), folder)  # another machine, the same numbers
    with pytest.raises(UsageError, match=r"another experiment.generate; choose another --out"):
        run_experiments(settings.model_copy(update={"generate": not settings.generate}), kinds, folder)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_task_that_is_lost_is_told_at_the_end_and_the_others_are_there(
    settings: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(group: Group, *rest: Any) -> None:
        if group.variant.name == "ultraedit":
            raise RuntimeError("out of some memory")
        work.do_cells(group, *rest)

    monkeypatch.setattr("malmen.tune.experiments.runner.do_cells", dying)
    chosen = settings.model_copy(update={"methods": ["ft", "ultraedit"], "seeds": [0], "edits": [2]})
    with pytest.raises(EditError, match=r"UltraEdit, seed 0: .*out of some memory.*tries again"):
        run_experiments(chosen, ("scaling",), tmp_path / "experiment")
    rows = json.loads((tmp_path / "experiment" / "results" / "scaling.json").read_text())["rows"]
    assert {row["variant"]: row["seeds"] for row in rows} == {"ft": 1, "ultraedit": 0}
    monkeypatch.undo()
    run_experiments(chosen, ("scaling",), tmp_path / "experiment")
    rows = json.loads((tmp_path / "experiment" / "results" / "scaling.json").read_text())["rows"]
    assert {row["variant"]: row["seeds"] for row in rows} == {"ft": 1, "ultraedit": 1}


def test_held_out_facts_of_another_matter_are_refused_before_anything_runs(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    chosen = settings.model_copy(
        update={"settings": {**settings.settings, "model.name": "gpt2", "data.train": "facts.jsonl"}}
    )
    with pytest.raises(UsageError, match=r"data\.train is a file and data\.validation is not given"):
        run_experiments(chosen, ("scaling",), tmp_path / "experiment")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_task_that_fits_nowhere_is_told_at_once(settings: ExperimentConfig, tmp_path: Path) -> None:
    with pytest.raises(EditError, match="each task asks for 999 CPU"):
        run_experiments(settings.model_copy(update={"cpus": 999}), ("scaling",), tmp_path / "experiment")
