"""What is said of the numbers follows from the numbers."""

from __future__ import annotations

from typing import Any

from malmen.tune.experiments.findings import findings
from malmen.tune.experiments.results import memory_summary


def row(variant: str, edits: int, score: float | None, residual: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "variant": variant, "label": variant.upper(), "edits": edits, "mean_residual": {"mean": residual},
        "score": None if score is None else {"mean": score}, "errors": [], **more,
    }  # fmt: skip


def scaling(malmen: float | None, mend: float) -> dict[str, Any]:
    return {
        "scaling": {
            "rows": [row("malmen", 64, malmen), row("mend", 64, mend), row("mend", 8, 0.99), row("ft", 64, None)]
        }
    }


def test_malmen_is_ahead_only_if_it_is() -> None:
    ((text, held),) = findings(scaling(0.9, 0.8))
    assert held and "at 64 edits" in text and "90.0" in text and "MEND 80.0" in text
    assert "FT (failed)" in text
    ((_, held),) = findings(scaling(0.8, 0.9))
    assert not held
    ((text, held),) = findings(scaling(None, 0.9))
    assert not held and "(failed), is above" in text
    ((_, held),) = findings({"scaling": {"rows": [row("malmen", 64, 0.9), row("ft", 64, None)]}})
    assert not held  # nothing to be above of


def test_the_residual_must_be_a_hundred_times_smaller() -> None:
    for sum_residual, expected in ((99.0, False), (101.0, True)):
        rows = [
            row("squares_answer", 256, 1, 1.0),
            row("sum_answer", 256, 1, sum_residual),
            row("squares_answer", 512, 1, 1000.0),
        ]
        ((text, held),) = findings({"cancellation": {"rows": rows}})
        assert held is expected and "at 256 edits" in text


def test_who_lacks_a_seed_is_not_ahead_and_it_is_said() -> None:
    rows = [row("malmen", 64, 0.9, errors=["singular"]), row("mend", 64, 0.8), row("ft", 32, 0.7, errors=["lost"])]
    ((text, held),) = findings({"scaling": {"rows": rows}})
    assert not held and text.endswith("(not all seeds: MALMEN)")
    rows = [row("malmen", 64, 0.9), row("mend", 64, 0.8, errors=["singular"])]
    ((text, held),) = findings({"scaling": {"rows": rows}})
    assert held and text.endswith("(not all seeds: MEND)")


def test_what_failed_is_told_as_not_holding() -> None:
    failed: dict[str, Any] = {"variant": "squares_answer", "edits": 256, "mean_residual": None, "score": None}
    ((text, held),) = findings({"cancellation": {"rows": [failed, row("sum_answer", 256, 1, 9.0)]}})
    assert not held and "failed" in text
    rows = [row("malmen", 256, 0.9, way="at once"), row("malmen", 256, None, way="union")]
    ((text, held),) = findings({"rounds": {"rows": rows}})
    assert not held and "failed" in text


def test_memory_is_flat_only_if_it_is() -> None:
    def rows(last: float | None, graph: dict[str, float]) -> list[dict[str, Any]]:
        return [
            {"way": "decomposed", "edits": 32, **peaks(148.0, 152.0)},
            {"way": "decomposed", "edits": 512, **({"error": "killed"} if last is None else peaks(last, last))},
            {"way": "concatenated", "edits": 32, **peaks(180.0, 180.0)},
            {"way": "concatenated", "edits": 512, **graph},
        ]

    def peaks(*seeds: float) -> dict[str, Any]:
        return memory_summary([{"peak_mb": peak, "before_mb": 100.0} for peak in seeds])

    large = peaks(660.0, 700.0)
    ((text, held),) = findings({"memory": {"rows": rows(190.0, large)}})
    assert held and "from 50 to 90 MB" in text and "from 80 to 580 MB" in text
    ((_, held),) = findings({"memory": {"rows": rows(210.0, large)}})
    assert not held
    ((text, held),) = findings({"memory": {"rows": rows(190.0, {"ran_out": 4.0})}})
    assert held and "ran out" in text
    ((text, held),) = findings({"memory": {"rows": rows(None, large)}})
    assert not held and "failed" in text


def test_a_rival_that_carries_over_as_well_and_drifts_no_more_is_named() -> None:
    def rows(rival_gs: float, rival_kl: float) -> dict[str, Any]:
        numbers = {"malmen": (0.8, 0.03), "gentle": (0.99, 0.001), "ft": (rival_gs, rival_kl), "mend": (0.5, 0.001)}
        measured = [
            row(name, 64, 1, generalization_success={"mean": gs}, own_raw_kl={"mean": kl}, own_chat_kl=None)
            for name, (gs, kl) in numbers.items()
        ]
        return {"tradeoff": {"rows": measured}}

    expected = "at 64 edits, raw prompts, no rival has MALMEN's GS with no more drift (80.0, KL 0.03)"
    assert findings(rows(0.95, 0.04)) == [(expected, True)]
    assert findings(rows(0.79, 0.02)) == [(expected, True)]
    assert findings(rows(0.8, 0.03)) == [(f"{expected}: FT", False)]  # a recipe ahead of it does not help MALMEN
    without = {"tradeoff": {"rows": rows(0.8, 0.03)["tradeoff"]["rows"][1:]}}
    assert findings(without) == []


def test_rounds_over_the_union_must_score_as_at_once() -> None:
    for union, expected in ((0.9, True), (0.8, False)):
        rows = [row("malmen", 64, 0.9, way="at once"), row("malmen", 64, union, way="union")]
        ((_, held),) = findings({"rounds": {"rows": rows}})
        assert held is expected


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert findings({}) == []
    assert findings({"scaling": {"rows": [row("mend", 64, 0.5)]}}) == []
