from __future__ import annotations

from typing import Any

from malmen.tune.experiments.report import render

ABOUT = {
    "experiment": {"seeds": [0, 1]},
    "config": {"model": {"name": "a<b"}, "training": {"steps": 5, "num_edits": 64, "min_edits": 16}},
}
SHARE = {"mean": 0.9, "deviation": 0.01, "values": [0.89, 0.91]}


def page(**results: Any) -> str:
    return " ".join(render(results, ABOUT, {}, ["malmen 1"]).split())


def test_seeds_that_failed_are_told_beside_the_others() -> None:
    row = {"variant": "ft", "label": "FT", "edits": 4, "errors": ["singular"], "seeds": 1}
    scaling = {"rows": [{**row, "edit_success": SHARE, "score": SHARE}]}
    assert "1 of the seeds; the others failed: singular" in page(scaling=scaling)
    scaling = {"rows": [{**row, "edit_success": SHARE, "score": SHARE}, {**row, "seeds": 0}]}
    assert '<td class="text" colspan="2">failed: singular</td>' in page(scaling=scaling)


def test_a_table_has_the_columns_that_were_measured_and_nothing_is_markup() -> None:
    row = {"variant": "ft", "label": "<FT>", "edits": 4, "errors": [], "seeds": 2, "edit_success": SHARE, "score": None}
    text = page(scaling={"rows": [row]})
    assert "<tr><th></th><th>edits</th><th>ES</th></tr>" in text
    assert "<td>&lt;FT&gt;</td><td>4</td><td>90.0 ± 1.0</td>" in text and "Editing a&lt;b: MALMEN" in text
    assert "with 16 to 64 edits each" in text


def test_memory_that_ran_out_and_failures_are_shown() -> None:
    peak = {"mean": 120.4, "deviation": 2.0, "values": [119.0, 121.8]}
    rows = [{"way": "decomposed", "edits": 4, "peak_mb": peak, "added_mb": peak}]
    rows.append({"way": "concatenated", "edits": 4, "ran_out": 4.0})
    text = page(memory={"rows": rows})
    assert "<td>120 ± 2</td><td>120 ± 2</td>" in text and "<td>more than 4 GB</td><td>–</td>" in text
    failure = {"label": "FT", "what": "the edit", "prompt": "Who?", "answer": "Ada", "before": None, "after": "Bob"}
    text = page(failures={"edits": 64, "rows": [failure]})
    assert "the first seed; as generated." in text and '<td class="text">–</td><td class="text">Bob</td>' in text
    assert "the most probable token" in page(failures={"edits": 64, "rows": [{**failure, "forced": True}]})
