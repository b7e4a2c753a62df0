"""What the experiments are expected to show, and whether they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from malmen.lm.own_text import Form
from malmen.methods.registry import METHODS
from malmen.tune.experiments.memory import WAYS
from malmen.tune.experiments.settings import CANCELLING

SCORE = "harmonic mean of ES, GS and LS (LS as a share of the unedited model's)"
_MANY = 32  # edits from which on MALMEN is to be ahead
_CANCELLATION_EDITS = 256  # edits at which the residuals are compared, if they were measured
_SAME_SCORE = 0.005  # largest difference of scores that count as the same


def findings(results: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Sentences with numbers, each true or false by the numbers."""
    checks = {
        "scaling": _ahead,
        "cancellation": _residuals,
        "rounds": _union,
        "memory": _flat,
        "tradeoff": _undominated,
    }
    return [found for kind, check in checks.items() if kind in results for found in check(results[kind]["rows"])]


def _mean(rows: list[dict[str, Any]], name: str, **wanted: Any) -> float | None:
    """A number of the first row with these values; None if there is no such row, or it failed."""
    row = next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)
    return row[name]["mean"] if row and row[name] else None


def _ahead(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """MALMEN's harmonic mean of ES, GS and LS beside each rival's; MALMEN is not ahead if one of its seeds failed."""
    sentences = []
    for edits in sorted({row["edits"] for row in rows if row["edits"] >= _MANY}):
        same = {row["variant"]: row for row in rows if row["edits"] == edits}
        rivals = [same[name] for name in METHODS if name != "malmen" and name in same]
        if "malmen" not in same or not rivals:
            continue
        mine = _mean([same["malmen"]], "score")
        scores = {row["label"]: _mean([row], "score") for row in rivals}
        theirs = ", ".join(f"{label} {_percent(value)}" for label, value in scores.items())
        text = f"at {edits} edits MALMEN's {SCORE}, {_percent(mine)}, is above {theirs}"
        numbers = [value for value in scores.values() if value is not None]
        held = mine is not None and bool(numbers) and mine > max(numbers)
        if lacking := [row["label"] for row in same.values() if row["errors"]]:
            text += f" (not all seeds: {', '.join(lacking)})"
        sentences.append((text, held and "MALMEN" not in lacking))
    return sentences


def _undominated(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Whether no rival has MALMEN's GS with no more drift, by form and edits. Recipes are on the curve alone: the best
    of several, chosen on held-out facts, would prove nothing."""
    sentences = []
    for form in get_args(Form):
        for edits in sorted({row["edits"] for row in rows}):
            same = [row for row in rows if row["edits"] == edits and row["variant"] in METHODS]
            points = {
                row["label"]: (row["generalization_success"]["mean"], row[f"own_{form}_kl"]["mean"])
                for row in same
                if row[f"own_{form}_kl"] and row["generalization_success"]
            }
            mine = points.pop(METHODS["malmen"].label, None)
            if mine is None or not points:
                continue
            ahead = [label for label, (gs, drift) in points.items() if gs >= mine[0] and drift <= mine[1]]
            text = f"at {edits} edits, {form} prompts, no rival has MALMEN's GS with no more drift "
            text += f"({_percent(mine[0])}, KL {mine[1]:.2g})"
            sentences.append((f"{text}{': ' + ', '.join(ahead) if ahead else ''}", not ahead))
    return sentences


def _percent(value: float | None) -> str:
    return "(failed)" if value is None else f"{100 * value:.1f}"


def _residuals(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    numbers = [row["edits"] for row in rows]
    edits = _CANCELLATION_EDITS if _CANCELLATION_EDITS in numbers else max(numbers, default=0)
    mine, theirs = (_mean(rows, "mean_residual", variant=name, edits=edits) for name in CANCELLING)
    text = f"at {edits} edits the mean residual of least squares is at least 100 times below that of a sum"
    if not mine or theirs is None:
        return [(f"{text}: at least one of them failed", False)]
    return [(f"{text}: {mine:.3g} and {theirs:.3g}, {theirs / mine:.0f} times", theirs >= 100 * mine)]


def _union(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    first, second = (_mean(rows, "score", variant="malmen", way=way) for way in ("at once", "union"))
    text = "in rounds, least squares over the union scores as at once"
    if first is None or second is None:
        return [(f"{text}: at least one of them failed", False)]
    return [(f"{text} ({100 * second:.2f} and {100 * first:.2f})", abs(first - second) < _SAME_SCORE)]


def _flat(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Growth with the edits of the memory that a step adds to the process; the mean over seeds."""
    rows = sorted(rows, key=lambda row: int(row["edits"]))
    mine, graph = ([row for row in rows if row["way"] == way] for way in WAYS)
    if len(mine) < 2 or len(graph) < 2:
        return []
    growth = f"from {mine[0]['edits']} to {mine[-1]['edits']} edits"
    text = f"{growth} the memory of the decomposed step grows by less than a tenth of one graph's"
    if any("peak_mb" not in row for row in (*mine, graph[0])):
        return [(f"{text}: at least one of them failed", False)]
    few, many = (row["added_mb"]["mean"] for row in (mine[0], mine[-1]))
    text += f": from {few:.0f} to {many:.0f} MB beside libraries and model"
    if "peak_mb" not in graph[-1]:
        ran_out = "ran_out" in graph[-1]
        return [(f"{text}; one graph {'ran out' if ran_out else 'failed'}", ran_out)]
    first, last = (row["added_mb"]["mean"] for row in (graph[0], graph[-1]))
    return [(f"{text}; one graph's from {first:.0f} to {last:.0f} MB", 10 * (many - few) <= last - first)]
