from __future__ import annotations

from malmen.tune.experiments.report import _scores


def test_seeds_that_failed_are_told_beside_the_others() -> None:
    row = {"variant": "ft", "label": "FT", "edits": 4, "errors": ["singular"], "seeds": 1}
    numbers = {name: {"mean": 0.9, "deviation": 0.0, "values": [0.9]} for name in ("edit_success", "score")}
    found = {"experiment": "scaling", "rows": [{**row, **numbers}], "model": "builtin", "seeds": [0, 1]}
    assert "1 of the seeds; the others failed: singular" in _scores(found)
