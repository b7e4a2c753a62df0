"""What the experiments were expected to show, and whether they do."""

from __future__ import annotations

from typing import Any

RIVALS = ("mend", "ft", "memit", "ultraedit")
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
    """MALMEN's harmonic mean of ES, GS and LS beside each rival's."""
    told = []
    for edits in sorted({row["edits"] for row in rows if row["edits"] >= _MANY}):
        mine = _mean(_find(rows, variant="malmen", edits=edits), "score")
        others = {name: _mean(_find(rows, variant=name, edits=edits), "score") for name in RIVALS}
        asked = {name: value for name, value in others.items() if _find(rows, variant=name, edits=edits)}
        if _find(rows, variant="malmen", edits=edits) is None or not asked:
            continue
        shown = ", ".join(f"{name} {_percent(value)}" for name, value in asked.items())
        text = f"at {edits} edits MALMEN's {SCORE}, {_percent(mine)}, is above {shown}"
        numbers = [value for value in asked.values() if value is not None]
        told.append((text, mine is not None and bool(numbers) and all(mine > value for value in numbers)))
    return told


def _percent(value: float | None) -> str:
    return "(failed)" if value is None else f"{100 * value:.1f}"


def _residuals(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    edits = max((row["edits"] for row in rows if row["edits"] <= 256), default=None)
    mine = _mean(_find(rows, variant="squares_answer", edits=edits), "mean_residual")
    theirs = _mean(_find(rows, variant="sum_answer", edits=edits), "mean_residual")
    if not mine or theirs is None:
        return []
    text = (
        f"at {edits} edits the mean residual of least squares, {mine:.3g}, is at least 100 times below that of a sum, "
    )
    return [(text + f"{theirs:.3g} ({theirs / mine:.0f} times)", theirs >= 100 * mine)]


def _union(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    once, union = (_find(rows, variant="malmen", way=way) for way in ("at once", "union"))
    first, second = _mean(once, "score"), _mean(union, "score")
    if first is None or second is None:
        return []
    text = f"in rounds, least squares over the union scores as at once ({100 * second:.2f} and {100 * first:.2f})"
    return [(text, abs(first - second) < 0.005)]


def _flat(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    broken = any(row["way"] == "decomposed" and "peak_mb" not in row for row in rows)
    mine = sorted((row["edits"], row["peak_mb"]) for row in rows if row["way"] == "decomposed" and "peak_mb" in row)
    other = sorted((row["edits"], row.get("peak_mb")) for row in rows if row["way"] == "concatenated")
    if len(mine) < 2 or not other:
        return []
    (few, low), (many, high) = mine[0], mine[-1]
    last = "ran out" if other[-1][1] is None else f"took {other[-1][1]:.0f} MB"
    text = (
        f"from {few} to {many} edits the decomposed step's peak grows by less than a quarter "
        f"({low:.0f} to {high:.0f} MB); one graph {last}"
    )
    return [(text, high <= 1.25 * low and not broken)]
