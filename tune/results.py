"""What a sweep found, as plain rows: for tables, pictures, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malmen.platform.tracking.store import redact_credentials
from malmen.tune.sweep_folder import SweepFolder, TrialRecord

SHARES = {"ES": "edit_success", "GS": "generalization_success", "LS": "locality_success"}


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
    points = [(*place, trial) for trial in trials if trial.status == "finished" and (place := _place(trial))]
    front = [
        (gs, ls, trial)
        for gs, ls, trial in points
        if not any(
            other_gs >= gs and other_ls >= ls and (other_gs, other_ls) != (gs, ls) for other_gs, other_ls, _ in points
        )
    ]
    return [trial for _, _, trial in sorted(front, key=lambda point: point[:2])]


def _place(trial: TrialRecord) -> tuple[float, float] | None:
    scores = trial.last.scores if trial.last else {}
    gs, ls = scores.get(SHARES["GS"]), scores.get(SHARES["LS"])
    return None if gs is None or ls is None else (gs, ls)


def sweep_results(folder: SweepFolder) -> dict[str, Any]:
    """All of it."""
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
