"""Sweeps: `sweep(config, space, out)`, and the entry point of a Ray job.

Ray Tune decides which trial runs when and how long; each trial is a training run of the platform. The sweep's folder
holds its state, so the same command resumes a killed sweep: trials that have ended are only reported to Ray Tune
again, the others are resumed from their checkpoints.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.error import TuneError
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from malmen.config import Config, absolute_paths, parse_config
from malmen.data.splits import data_fingerprint, validation_records
from malmen.errors import EditError, UsageError, last_line
from malmen.lm.model import load_skeleton
from malmen.platform.cluster import Roles, check_room, connected, room_for_runs, size_roles
from malmen.platform.places import check_lasting, in_ray_job
from malmen.platform.tracking.store import absolute
from malmen.platform.tracking.tracker import Tracker, tracking_uri
from malmen.runs.files import exclusive_folder
from malmen.training import check_enough
from malmen.tune.champion import Champion, crown
from malmen.tune.follow import Follower, ProgressListener, end_tracking_run
from malmen.tune.report import write_report
from malmen.tune.settings import SweepConfig
from malmen.tune.space import SweepSearch, check_space, number_of_trials, with_evaluations
from malmen.tune.sweep_folder import SweepFolder, TrialRecord
from malmen.tune.trial import SweepTrial


@dataclass
class SweepResult:
    """A finished sweep."""

    folder: Path
    trials: list[TrialRecord]
    champion: Champion
    report: Path
    seconds: float
    tracking_run: str | None


def sweep(
    config: Config, space: SweepConfig, out: str | Path, *, address: str | None = None,
    listener: ProgressListener | None = None,
) -> SweepResult:  # fmt: skip
    """Try a space; an unfinished sweep of the same config and space in `out` is resumed."""
    start, listener = time.perf_counter(), listener or ProgressListener()
    config, grace = with_evaluations(config if in_ray_job() else absolute_paths(config), space)
    check_space(config, space, load_skeleton(config.model)[0])
    data = data_fingerprint(config)
    check_enough(validation_records(config), config.training.eval_edits or 1)
    if "://" in str(out):
        raise UsageError(f"a sweep writes to a folder, on a cluster to a shared one; given {str(out)!r}")
    if in_ray_job():
        check_lasting(config, out)
    folder = SweepFolder(Path(out).absolute())
    with exclusive_folder(folder.path), connected(address, config.cluster) as own:
        roles = size_roles(config.cluster, config.model, own=own)
        config = _for_trials(config, folder, roles)
        facts = folder.begin(config, space, data)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free = ray.cluster_resources() if own else ray.available_resources()
        room = room_for_runs(config.cluster, roles, nodes, free)
        check_room(config.cluster, roles)
        tags = {"malmen.sweep": str(folder.path)}
        with Tracker.start(config, str(folder.path), tags, facts.get("mlflow_run")) as tracker:
            facts["mlflow_run"] = tracker.run_id
            folder.save(config, space, facts)
            _run_trials(config, space, folder, grace, room, tracker, listener)
            write_report(folder)  # also where no trial finishes
            champion = crown(config, space, folder, facts, tracker.run_id, listener)
            report = write_report(folder)
            trials = folder.trials()
            counts = Counter(f"trials/{trial.status}" for trial in trials)
            tracker.log(0, {**counts, "best/score": champion.score, "best/trial": champion.number})
            tracker.log_artifacts(report.parent, "report")
        shutil.rmtree(folder.cache, ignore_errors=True)
    return SweepResult(folder.path, trials, champion, report, time.perf_counter() - start, facts["mlflow_run"])


def _for_trials(config: Config, folder: SweepFolder, roles: Roles) -> Config:
    """The config that all trials share: one MLflow store, one cache, and the resources of the roles."""
    raw = config.model_dump(mode="json")
    tracked = config.tracking.enabled
    raw["tracking"]["uri"] = absolute(tracking_uri(config.tracking, str(folder.path))) if tracked else None
    raw["batch"]["cache_dir"] = config.batch.cache_dir or str(folder.cache)
    raw["cluster"] |= {
        "overlap": roles.overlap,
        "lm_gpus": roles.lm.get("GPU", 0.0),
        "hypernet_gpus": roles.hypernet.get("GPU", 0.0),
    }
    return parse_config(raw, "the sweep")


def _run_trials(
    config: Config, space: SweepConfig, folder: SweepFolder, grace: int, room: int, tracker: Tracker,
    listener: ProgressListener,
) -> None:  # fmt: skip
    total = number_of_trials(space)
    ended = _ended(folder, total)
    for trial in ended:  # the sweep may have been killed before it ended their MLflow runs
        end_tracking_run(config, folder, trial)
    if len(ended) == total:  # the sweep was killed after its trials
        return
    concurrent = min(total, space.concurrent or room)
    listener.progress(0, total)
    listener.event(f"{total} trials, {concurrent} at a time")
    if concurrent > room:
        listener.event(
            f"the cluster has room for {room} trials at a time now: the others wait, for cluster.wait_seconds at most"
        )
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths of models and data mean what they do here
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new one prints to standard output even with verbose=0
    here = f"node:{ray.util.get_node_ip_address()}"  # the driver's records are files of this node
    trainable = tune.with_parameters(SweepTrial, sweep_folder=str(folder.path), parent=tracker.run_id)
    scheduler: TrialScheduler = FIFOScheduler()
    if space.early_stopping == "asha":
        scheduler = _Asha(
            time_attr="step", grace_period=grace, max_t=config.training.steps, reduction_factor=space.reduction_factor
        )
    tuner = tune.Tuner(
        tune.with_resources(trainable, tune.PlacementGroupFactory([{here: 0.001}])),
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            search_alg=SweepSearch(folder, space),
            scheduler=scheduler,
            num_samples=total,
            max_concurrent_trials=concurrent,
            reuse_actors=True,  # a trial's process takes seconds to import what it needs
        ),
        run_config=tune.RunConfig(
            name=f"sweep-{os.getpid()}-{time.time_ns()}",  # Ray Tune's own notes; nothing resumes from them
            storage_path=str(folder.path / ".ray_tune"),
            callbacks=[Follower(folder, config, listener, total)],
            # A lost process of a trial is started again, and resumes its run from the last checkpoint.
            failure_config=tune.FailureConfig(max_failures=config.cluster.max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the runs have their own
            verbose=0,
        ),
    )
    _fit(tuner)
    if (done := len(_ended(folder, total))) < total:
        raise EditError(
            f"the sweep was interrupted: {done} of {total} trials have ended; the same command resumes the others"
        )
    shutil.rmtree(folder.path / ".ray_tune", ignore_errors=True)


def _fit(tuner: tune.Tuner) -> None:
    """Ray Tune replaces the handler of Ctrl-C and leaves its own behind."""
    before = signal.getsignal(signal.SIGINT)
    try:
        tuner.fit()
    except TuneError as error:
        raise EditError(f"the sweep was interrupted: {last_line(error)}; the same command resumes it") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _ended(folder: SweepFolder, total: int) -> list[TrialRecord]:
    return [trial for trial in folder.trials()[:total] if trial.ended]


class _Asha(AsyncHyperBandScheduler):
    """Evaluations from before the sweep was killed fill the rungs again; they are not judged a second time."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        return str(TrialScheduler.CONTINUE if result["replayed"] else decision)


if __name__ == "__main__":
    from malmen.tune.cli import main

    main()
