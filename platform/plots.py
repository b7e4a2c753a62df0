"""Pictures of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_training(history: list[dict[str, Any]], path: Path) -> None:
    """Losses by step, and the held-out scores where there are any, as a PNG."""
    scored = [row for row in history if row.get("scores")]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, scores = figure.subplots(1, 2)
    trained = [row for row in history if "meta_loss" in row]
    steps = [row["step"] for row in trained]
    for name, label in (("generalization_loss", "L_gen"), ("locality_loss", "L_loc")):
        losses.plot(steps, [max(row[name], 1e-6) for row in trained], label=label)
    losses.set(xlabel="step", ylabel="loss", yscale="log", title="meta loss")
    losses.legend()
    names = (("edit_success", "ES"), ("generalization_success", "GS"), ("locality_success", "LS"))
    for name, label in names:
        scores.plot([row["step"] for row in scored], [row["scores"][name] for row in scored], marker="o", label=label)
    scores.set(xlabel="step", ylabel="share of answer tokens", ylim=(0, 1.02), title="held-out edits")
    scores.legend(loc="lower right")
    figure.savefig(path, dpi=120)
