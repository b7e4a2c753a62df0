"""The results of a sweep as plain rows, for tables, pictures and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malmen.metrics import METRICS
from malmen.platform.tracking.store import redact_credentials
from malmen.tune.sweep_folder import SweepFolder, TrialRecord

SHARES = {metric.label: metric.name for metric in METRICS}


def trial_row(trial: TrialRecord) -> dict[str, Any]:
    """One trial at its last evaluation."""
    last = trial.last
    return {
        "number": trial.number,
        "status": trial.status,
        **trial.params,
        "step": last.step if last else 0,
        "seconds": round(last.seconds, 1) if last else 0.0,
        "score": last.score if last else None,
        **{short: last.scores.get(name) if last else None for short, name in SHARES.items()},
        "why": trial.why,
        "tracking_run": trial.tracking_run,
    }


def pareto_front(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The finished trials that no other one beats in GS or LS without being worse in the other; by GS."""
    points: dict[int, tuple[float, float]] = {}  # (GS, LS) by number of the trial
    for trial in trials:
        scores = trial.last.scores if trial.last and trial.status == "finished" else {}
        gs, ls = scores.get(SHARES["GS"]), scores.get(SHARES["LS"])
        if gs is not None and ls is not None:
            points[trial.number] = gs, ls

    def is_beaten(gs: float, ls: float) -> bool:
        return any(rival != (gs, ls) and rival[0] >= gs and rival[1] >= ls for rival in points.values())

    front = [trial for trial in trials if trial.number in points and not is_beaten(*points[trial.number])]
    return sorted(front, key=lambda trial: points[trial.number])


def sweep_results(folder: SweepFolder) -> dict[str, Any]:
    """The sweep, its best trial and all its trials, as in `results.json`."""
    config, sweep, facts = folder.load()
    trials = folder.trials()
    return {
        "model": config.model.name,
        "steps": config.training.steps,
        "search": sweep.search,
        "early_stopping": sweep.early_stopping,
        "score": sweep.score,
        "seed": config.seed,
        "champion": facts.get("champion"),
        "pareto_front": [trial.number for trial in pareto_front(trials)],
        "trials": [trial_row(trial) for trial in trials],
        "tracking_run": facts.get("mlflow_run"),
        "tracking_uri": redact_credentials(config.tracking.uri) if config.tracking.uri else None,
    }
