"""What benchmarks/frontier.py computes without a real model: the interpolation, and the edits of growing strength."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from malmen.config import load_config
from malmen.lm.model import load_lm
from malmen.lm_side import MetaLosses

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frontier


def test_the_loss_at_a_drift_is_linear_in_the_drifts_root() -> None:
    points = [
        frontier.Point(0.0, MetaLosses(10.0, 0.0)),
        frontier.Point(1.0, MetaLosses(6.0, 1.0)),
        frontier.Point(2.0, MetaLosses(4.0, 4.0)),
    ]
    assert frontier.at_drift(points, 0.25) == pytest.approx(8.0)
    assert frontier.at_drift(points, 2.25) == pytest.approx(5.0)
    assert frontier.at_drift(points, 5.0) is None


@pytest.mark.slow  # writes the model's own texts and solves an edit at several strengths
def test_stronger_edits_drift_more_and_rephrasings_gain(tmp_path: Path) -> None:
    small = ["training.num_edits=8", "training.min_edits=null", "own_text.texts=16", f"own_text.folder={tmp_path}"]
    config = load_config(frontier.CONFIGS / "builtin.yaml", [*small, "editor.rank=8"])
    points = list(frontier.frontier(load_lm("builtin"), config, 0.5))
    drifts = [point.losses.locality for point in points]
    assert drifts == sorted(drifts) and drifts[0] < 1e-6 and drifts[-1] > 0.5
    assert min(point.losses.generalization for point in points) < 0.8 * points[0].losses.generalization
