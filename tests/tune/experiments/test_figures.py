from __future__ import annotations

import json
from pathlib import Path

from malmen.tune.experiments.figures import draw
from malmen.tune.experiments.results import memory_summary


def test_a_picture_can_be_drawn_again_from_its_json_alone(tmp_path: Path) -> None:
    held, lost = {"peak_mb": 100.0, "before_mb": 80.0}, {"ran_out": 4.0}
    rows = [
        {
            "way": way,
            "edits": edits,
            **memory_summary([lost if way == "concatenated" and edits == 64 else held, held]),
        }
        for way in ("decomposed", "concatenated")
        for edits in (32, 64)
    ]
    found = json.loads(json.dumps({"experiment": "memory", "model": "builtin", "seeds": [0, 1], "rows": rows}))
    assert [path.suffix for path in draw(found, tmp_path)] == [".png", ".svg"]
    assert (tmp_path / "memory.svg").stat().st_size > 1000
