"""The best editor of a sweep: promoted, or trained again for longer; registered under an alias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from malmen.config import Config
from malmen.errors import EditError
from malmen.metrics import score
from malmen.platform.tracking.registry import register_editor, registered_name
from malmen.platform.tracking.store import clear_errors, connect
from malmen.platform.tracking.tracker import run_exists
from malmen.platform.train import Listener, train
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_state
from malmen.runs.run_folder import run_facts
from malmen.tune.follow import ProgressListener
from malmen.tune.settings import Params, SweepConfig
from malmen.tune.sweep_folder import SweepFolder, TrialRecord
from malmen.tune.trial import trial_config


@dataclass(frozen=True)
class Champion:
    """The best trial and its editor."""

    number: int  # of its trial
    params: Params
    score: float
    scores: dict[str, Any]
    steps: int
    editor: str  # the folder of its run
    uri: str | None  # models:/name@alias; None without a registry
    version: str | None


def best_trial(trials: Sequence[TrialRecord]) -> TrialRecord:
    """The trial with the highest score among those that finished; of equals the first."""
    finished = [trial for trial in trials if trial.status == "finished" and trial.last]
    if not finished:
        failed = [f"trial {trial.number}: {trial.why}" for trial in trials if trial.status == "failed"]
        raise EditError(f"no trial has finished, so none is the best; {'; '.join(failed[:3]) or 'none has failed'}")
    return max(finished, key=lambda trial: trial.last.score if trial.last else 0.0)


def crown(
    base: Config, sweep: SweepConfig, folder: SweepFolder, facts: dict[str, Any], parent: str | None,
    listener: ProgressListener,
) -> Champion:  # fmt: skip
    """Find the best trial, train its config again if `retrain_steps` says so, and register its editor."""
    best = best_trial(folder.trials())
    config, run = trial_config(base, sweep, best.params), folder.trial_path(best.number)
    if sweep.retrain_steps:
        listener.event(f"training trial {best.number}'s config again, {sweep.retrain_steps} steps")
        training = config.training.model_copy(update={"steps": sweep.retrain_steps})
        config = config.model_copy(update={"training": training})
        run = folder.path / f"champion-{best.number:04d}-{sweep.retrain_steps}"
        _train_again(config, run, parent, listener)
    checkpoint = latest_checkpoint(run)
    state = read_state(checkpoint)
    scores: dict[str, Any] = state["scores"]
    uri = version = None
    if config.tracking.uri is not None and parent is not None:
        with clear_errors(config.tracking.uri):
            client, name = connect(config.tracking.uri), registered_name(config)
            run_id = run_facts(run).get("mlflow_run")
            if run_id is None or not run_exists(client, run_id):
                run_id = parent  # its own is in another store, because the sweep was resumed with a new one
            # The same version each time: a checkpoint of a run is registered once.
            version = register_editor(client, run_id, checkpoint, config).version
            client.set_registered_model_alias(name, sweep.alias, version)
        uri = f"models:/{name}@{sweep.alias}"
    value = score(scores, sweep.score) or 0.0
    champion = Champion(best.number, best.params, value, scores, state["step"], str(run), uri, version)
    facts["champion"] = asdict(champion)
    folder.save(base, sweep, facts)
    return champion


def _train_again(config: Config, run: Path, parent: str | None, listener: ProgressListener) -> None:
    """Train into `run`, or resume it; a finished run is left as it is."""
    done = read_state(run)["step"] if list(run.glob("checkpoint-*")) else 0
    unfinished = not run_facts(run).get("finished", True)  # its last step may be saved and not measured yet
    if done < config.training.steps or unfinished:
        train(config, run, parent=parent, register=False, listener=Listener(event=listener.event))
