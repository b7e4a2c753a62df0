"""What the experiments were expected to show, and whether they do."""

from __future__ import annotations

from typing import Any

from malmen.methods.registry import METHODS

SCORE = "harmonic mean of ES, GS and LS (LS as a share of the unedited model's)"
_MANY = 32  # edits from which on MALMEN is to be ahead


def findings(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """Sentences with numbers, each true or false by the numbers."""
    rows: list[tuple[str, bool]] = []
    if "scaling" in found:
        rows += _ahead(found["scaling"]["rows"])
    if "cancellation" in found:
        rows += _residuals(found["cancellation"]["rows"])
    if "rounds" in found:
        rows += _union(found["rounds"]["rows"])
    if "memory" in found:
        rows += _flat(found["memory"]["rows"])
    return rows


def _mean(row: dict[str, Any] | None, name: str) -> float | None:
    return row[name]["mean"] if row and row[name] else None


def _find(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def _ahead(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """MALMEN's harmonic mean of ES, GS and LS beside each rival's; who lacks a seed that others have is not ahead."""
    told = []
    for edits in sorted({row["edits"] for row in rows if row["edits"] >= _MANY}):
        mine = _mean(_find(rows, variant="malmen", edits=edits), "score")
        others = [row for name in METHODS if name != "malmen" and (row := _find(rows, variant=name, edits=edits))]
        asked = {row["label"]: _mean(row, "score") for row in others}
        if _find(rows, variant="malmen", edits=edits) is None or not asked:
            continue
        shown = ", ".join(f"{name} {_percent(value)}" for name, value in asked.items())
        text = f"at {edits} edits MALMEN's {SCORE}, {_percent(mine)}, is above {shown}"
        numbers = [value for value in asked.values() if value is not None]
        held = mine is not None and bool(numbers) and all(mine > value for value in numbers)
        if lacking := [row["label"] for row in rows if row["edits"] == edits and row["errors"]]:
            text += f" (not all seeds: {', '.join(lacking)})"
        told.append((text, held and "MALMEN" not in lacking))
    return told


def _percent(value: float | None) -> str:
    return "(failed)" if value is None else f"{100 * value:.1f}"


def _residuals(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    asked = [row["edits"] for row in rows]
    edits = 256 if 256 in asked else max(asked, default=0)
    mine = _mean(_find(rows, variant="squares_answer", edits=edits), "mean_residual")
    theirs = _mean(_find(rows, variant="sum_answer", edits=edits), "mean_residual")
    text = f"at {edits} edits the mean residual of least squares is at least 100 times below that of a sum"
    if not mine or theirs is None:
        return [(f"{text}: at least one of them failed", False)]
    return [(f"{text}: {mine:.3g} and {theirs:.3g}, {theirs / mine:.0f} times", theirs >= 100 * mine)]


def _union(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    once, union = (_find(rows, variant="malmen", way=way) for way in ("at once", "union"))
    first, second = _mean(once, "score"), _mean(union, "score")
    text = "in rounds, least squares over the union scores as at once"
    if first is None or second is None:
        return [(f"{text}: at least one of them failed", False)]
    return [(f"{text} ({100 * second:.2f} and {100 * first:.2f})", abs(first - second) < 0.005)]


def _flat(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """What a step adds to the process, and how that grows with the edits."""
    ways = {way: {row["edits"]: row for row in rows if row["way"] == way} for way in ("decomposed", "concatenated")}
    mine, graph = ways.values()
    if len(mine) < 2 or len(graph) < 2:
        return []
    few, many = min(mine), max(mine)
    text = f"from {few} to {many} edits the memory of the decomposed step grows by less than a tenth of one graph's"
    if any("peak_mb" not in row for row in (*mine.values(), graph[min(graph)])):
        return [(f"{text}: at least one of them failed", False)]
    text += f": from {added_mb(mine[few]):.0f} to {added_mb(mine[many]):.0f} MB beside libraries and model"
    last = graph[max(graph)]
    if "peak_mb" not in last:
        return [(f"{text}; one graph {'ran out' if 'ran_out' in last else 'failed'}", "ran_out" in last)]
    first = graph[min(graph)]
    held = 10 * (added_mb(mine[many]) - added_mb(mine[few])) <= added_mb(last) - added_mb(first)
    return [(f"{text}; one graph's from {added_mb(first):.0f} to {added_mb(last):.0f} MB", held)]


def added_mb(row: dict[str, Any]) -> float:
    """Of a step, to what the process held before it; the mean over seeds."""
    return float(row["added_mb"]["mean"])
