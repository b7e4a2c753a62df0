"""Meta-training on a Ray cluster: `train(config, out)`, and the entry point of a Ray job.

The driver starts the hypernet actors and a Ray Train run whose workers hold the language model, then follows: it
shows progress, writes the history, logs to MLflow, and says who waits for whom if nothing moves any more. No tensor
passes through it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from malmen.config import SPLIT, Config, absolute_paths
from malmen.data.splits import check_held_out, data_fingerprint
from malmen.errors import EditError, RunStopped, UsageError
from malmen.lm.layers import LayerSpec, find_layers
from malmen.lm.model import load_skeleton
from malmen.meta import StepReport
from malmen.platform.board import Board
from malmen.platform.cluster import Roles, actor_options, check_room, connected, size_roles
from malmen.platform.hypernet_group import HypernetGroup
from malmen.platform.places import check_lasting, check_shared, in_ray_job, ray_train_folder
from malmen.platform.tracking.registry import RegisteredEditor, describe_checkpoint
from malmen.platform.tracking.tracker import Tracker
from malmen.platform.train_loop import LoopSettings, train_loop
from malmen.runs.checkpoint_lookup import read_state
from malmen.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)

_OF_STEPS, _OF_EVALUATIONS = "loss/meta", "held_out/edit_success"  # metrics that every such row has
_STEP_FIELDS = ("generalization_loss", "locality_loss", "meta_loss", "grad_norm", "seconds")


@dataclass
class TrainedEditor:
    """A finished run."""

    run: str | Path
    checkpoint: str | Path
    steps: int
    scores: dict[str, Any]
    seconds: float
    history: list[dict[str, Any]] = field(default_factory=list)
    tracking_run: str | None = None
    registered: RegisteredEditor | None = None


@dataclass
class Listener:
    """Whom a run tells what happens; `stopped` is asked whether it shall end before its time."""

    step: Callable[[int, StepReport], None] = lambda _step, _report: None
    evaluation: Callable[[int, dict[str, Any]], None] = lambda _step, _scores: None
    event: Callable[[str], None] = lambda _text: None
    stopped: Callable[[], bool] = lambda: False


def train(
    config: Config,
    out: str | Path,
    *,
    address: str | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    parent: str | None = None,
    register: bool = True,
    whole: bool = True,
) -> TrainedEditor:
    """Train an editor into `out`; an unfinished run of the same config there is gone on with, to the same θ.

    `parent` is the MLflow run that this one belongs to, if any. `register`: the editor goes into the model registry.
    `whole`: relative paths mean this process's folder, which the workers do not share.
    """
    start, listener = time.perf_counter(), listener or Listener()
    check_held_out(config)
    layers = _layers(config)
    if in_ray_job():
        check_lasting(config, out)
    elif whole:
        config = absolute_paths(config)
    out = out if "://" in str(out) else Path(out).absolute()
    folder = RunFolder.open(out, config, resume=resume)
    tags = {"data": data_fingerprint(config), "run": str(folder.store.location)}
    folder.check_data(tags["data"])
    with connected(address, config.cluster) as own:
        roles = size_roles(config.cluster, config.model, own=own)
        check_room(config.cluster, roles)
        with Tracker.start(config, str(out), tags, folder.facts.get("mlflow_run"), parent) as tracker:
            folder.begin({"mlflow_run": tracker.run_id, "finished": False})
            if folder.history:
                tracker.remember((_OF_STEPS, _OF_EVALUATIONS), otherwise=range(folder.steps_done + 1))
            if folder.steps_done:
                listener.event(f"going on from step {folder.steps_done} of {folder.store.location}")
            _run(config, layers, roles, folder, tracker, listener)
            trained = _finish(config, folder, tracker, time.perf_counter() - start, register)
        folder.begin({"finished": True})  # only now: whoever is killed before registers with the same command
    return trained


def _layers(config: Config) -> list[LayerSpec]:
    """From the model's shape alone, so that a wrong name is an error now and not after the cluster has started."""
    model, _ = load_skeleton(config.model)
    return find_layers(model, config.editor.layers, config.editor.ffn)


def _run(
    config: Config, layers: list[LayerSpec], roles: Roles, folder: RunFolder, tracker: Tracker, listener: Listener
) -> None:
    run = str(folder.store.location)
    # On the driver's own node, so that no other node's loss can take it away.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
    group = HypernetGroup.start(
        config, layers, run, resources=actor_options(roles.hypernet), threads=roles.hypernet_threads
    )
    loop = LoopSettings(config, group, board, run, roles.lm_threads, roles.overlap, {"mlflow_run": tracker.run_id})
    try:
        with _fitting(_trainer(config, roles, run, loop)) as fit:
            begun = followed = False
            try:
                for row in _follow(board, group, fit, config.cluster.stall_seconds, listener.stopped):
                    if row["kind"] == "begins" and not begun:  # who begins later has lost nothing that is written
                        begun = True
                        folder.cut(row["step"])
                        for old in folder.history:  # what a killed driver had not sent; the tracker knows the rest
                            tracker.log(old["step"], _metrics(old))
                    _take(row, folder, tracker, listener)
                followed = True
            finally:
                if not followed:
                    with suppress(RayError):  # the board may be what is missing
                        _end_early(board, group, fit)
    finally:
        try:
            folder.flush()
        finally:
            for actor in (*group.actors, board):
                ray.kill(actor)


def _end_early(board: Any, group: HypernetGroup, fit: _Fit) -> None:
    """The ranks learn of it when they miss the actors; nothing of the run is left then."""
    ray.get(board.stop.remote(), timeout=60)
    for actor in group.actors:
        ray.kill(actor)
    fit.join(30)
    if fit.is_alive():
        logger.warning("the LM workers of %s have not ended within 30 seconds", group.run)


def _trainer(config: Config, roles: Roles, run: str, loop: LoopSettings) -> TorchTrainer:
    cluster, gpu = config.cluster, bool(roles.lm.get("GPU"))
    if config.model.device == SPLIT:  # over a worker's own GPUs, and not over those of its neighbours on the node
        os.environ["TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES"] = "0"
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # relative paths of models and data mean what they do here
    return TorchTrainer(
        train_loop,
        # As a reference: Ray Train's controller would otherwise unpack it, and import all of transformers for nothing.
        train_loop_config={"loop": ray.put(loop)},
        scaling_config=ScalingConfig(
            num_workers=cluster.lm_workers, use_gpu=gpu, resources_per_worker=dict(roles.lm) or {"CPU": 0}
        ),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=int(cluster.stall_seconds)),
        run_config=RunConfig(
            # Ray Train's own notes. A new name each time: with the same one it would silently resume.
            name=f"train-{os.getpid()}-{time.time_ns()}",
            storage_path=ray_train_folder(run),
            failure_config=FailureConfig(max_failures=cluster.max_failures),
        ),
    )


class _Fit(threading.Thread):
    """`trainer.fit()` beside the driver's own work."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="ray-train", daemon=True)
        self.trainer = trainer
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.trainer.fit()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the driver's thread
            self.error = error


@contextmanager
def _fitting(trainer: TorchTrainer) -> Iterator[_Fit]:
    fit = _Fit(trainer)
    fit.start()
    yield fit
    if isinstance(fit.error, RayError | RuntimeError):
        lines = [line.strip() for line in str(fit.error).splitlines() if line.strip()]
        what = lines[-1] if lines else repr(fit.error)
        raise EditError(
            f"the LM workers failed: {what}; the same command goes on from the last checkpoint"
        ) from fit.error
    if fit.error is not None:
        raise fit.error


def _follow(
    board: Any, group: HypernetGroup, fit: _Fit, stall_seconds: float, stopped: Callable[[], bool] = lambda: False
) -> Iterator[dict[str, Any]]:
    """The rows that the ranks record, until they are done; EditError if nothing comes for too long."""
    last, rows = time.monotonic(), []
    while True:
        alive = fit.is_alive()
        rows = ray.get(board.take.remote(), timeout=60)
        for row in rows:
            yield row
            last = time.monotonic()
        if not alive and not rows:
            return
        if stopped():
            raise RunStopped("the run was stopped before its last step; the same command goes on with it")
        if time.monotonic() - last > stall_seconds:
            waiting = [*ray.get(board.doing.remote(), timeout=60), *group.status()]
            raise EditError(
                f"nothing happened for cluster.stall_seconds={stall_seconds:g}; who does what: {'; '.join(waiting)}"
            )
        if not rows:
            fit.join(0.1)


def _take(row: Mapping[str, Any], folder: RunFolder, tracker: Tracker, listener: Listener) -> None:
    """One thing that happened: into the history, to MLflow, to who listens. Steps that were done again count once."""
    kind, step = row["kind"], row.get("step", 0)
    if kind == "error":
        raise (UsageError if row["exit_code"] == 2 else EditError)(row["message"])
    if kind == "lost":
        listener.event(f"step {step}: {row['why']}; restored, going on")
    elif kind == "remark":
        listener.event(row["text"])
    elif kind == "saving":
        folder.flush()
    elif kind == "checkpoint":
        check_shared(folder.store, step)
    elif kind == "step" and step > (folder.history[-1]["step"] if folder.history else 0):
        report = StepReport(**{name: row[name] for name in _STEP_FIELDS})
        folder.add({name: value for name, value in row.items() if name != "kind"})
        listener.step(step, report)
        tracker.log(step, _metrics(row))
    elif kind == "evaluation":
        _take_evaluation(dict(row), folder, tracker, listener)


def _take_evaluation(row: dict[str, Any], folder: RunFolder, tracker: Tracker, listener: Listener) -> None:
    step, scores = row["step"], row["scores"]
    if folder.has_scores(step):
        return
    folder.add({"step": step, "scores": scores, "lm_memory": row["lm_memory"]})
    folder.flush()
    listener.evaluation(step, scores)
    tracker.log(step, _metrics(row))


def _metrics(row: Mapping[str, Any]) -> dict[str, float | None]:
    """What MLflow gets of a row of the history, a step or an evaluation. One that `--local` wrote has less."""
    metrics = {f"held_out/{name}": value for name, value in row.get("scores", {}).items()}
    metrics |= {f"loss/{name}": row.get(f"{name}_loss") for name in ("generalization", "locality", "meta")}
    metrics |= {name: row.get(name) for name in ("grad_norm", "bytes_moved", "cache_mb")}
    metrics["seconds/step"] = row.get("wall")
    for kind in ("seconds", "damping", "edit_lr"):
        metrics |= {f"{kind}/{name}": value for name, value in row.get(kind, {}).items()}
    for role in ("hypernet", "lm"):
        for index, found in enumerate(row.get(f"{role}_memory", [])):
            metrics |= {f"memory_mb/{role}{index}/{kind}": peak for kind, peak in found.items()}
    return metrics


def _finish(config: Config, folder: RunFolder, tracker: Tracker, seconds: float, register: bool) -> TrainedEditor:
    """The newest checkpoint; uploaded and registered if it shall be."""
    names = folder.store.checkpoints()
    if not names:
        raise EditError(f"the run ended without a checkpoint in {folder.store.location}")
    checkpoint = folder.store.join(names[-1])
    state = read_state(checkpoint)
    scores, registered = state["scores"], None
    if register:
        with folder.store.fetch(names[-1], without=["optimizer.safetensors"]) as local:
            registered = tracker.register(local, *describe_checkpoint(local, config))
    return TrainedEditor(
        folder.store.location, checkpoint, state["step"], scores, seconds, folder.history, tracker.run_id, registered
    )


if __name__ == "__main__":
    from malmen.platform.cli.main import main

    main(["train"])
