"""Meta-training on a Ray cluster: `train(config, out)`, and the entry point of a Ray job.

The driver starts the processes of a run: the board, the hypernet actors (hypernet_group.py) and the LM workers: a Ray
Train run whose processes hold a language model (lm_worker.py) and run the loop of train_loop.py. Then it writes down
their events, starts lost LM workers again, and says who waits for whom if nothing happens any more. No
tensor passes through it.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from malmen.config import SPLIT, Config, absolute_paths
from malmen.data.splits import check_held_out, data_fingerprint
from malmen.errors import EditError, RunStopped, UsageError, last_line
from malmen.lm.layers import LayerSpec, edited_layers
from malmen.lm.model import load_skeleton
from malmen.meta import StepReport, no_progress
from malmen.platform import events
from malmen.platform.cluster import Roles, actor_options, check_room, connected, size_roles
from malmen.platform.events import Board, Event
from malmen.platform.hypernet_group import HypernetGroup
from malmen.platform.places import check_lasting, check_shared, in_ray_job
from malmen.platform.tracking.registry import RegisteredEditor
from malmen.platform.tracking.tracker import Tracker
from malmen.platform.train_loop import LoopSettings, train_loop
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_state
from malmen.runs.run_folder import RunFolder
from malmen.runs.storage import RunStore

logger = logging.getLogger(__name__)


@dataclass
class Listener:
    """Callbacks of a run. `stopped` says whether it is to end before its last step."""

    step: Callable[[int, StepReport], None] = lambda _step, _report: None
    evaluation: Callable[[int, dict[str, Any]], None] = lambda _step, _scores: None
    event: Callable[[str], None] = lambda _text: None
    stopped: Callable[[], bool] = lambda: False


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


def train(
    config: Config, out: str | Path, *, address: str | None = None, resume: bool = False,
    listener: Listener | None = None, parent: str | None = None, register: bool = True, resolve_paths: bool = True,
) -> TrainedEditor:  # fmt: skip
    """Train an editor into `out`; an unfinished run of the same config there is resumed, to the same θ.

    `parent` is the MLflow run that this one belongs to, if any. `register`: put the editor into the model registry.
    `resolve_paths`: make relative paths absolute, because the workers have another working directory.
    """
    start, listener = time.perf_counter(), listener or Listener()
    check_held_out(config)
    if config.training.trajectory > 1:
        raise UsageError(
            f"training.trajectory is {config.training.trajectory}, but only one process trains on trajectories: use "
            "`malmen train --local` or an experiment, or set it to 1"
        )
    # From the model's shape alone, so that a wrong name is an error now and not after the cluster has started.
    layers = edited_layers(load_skeleton(config.model)[0], config.editor)
    if in_ray_job():
        check_lasting(config, out)
    elif resolve_paths:
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
            if folder.steps_done:
                listener.event(f"resuming {folder.store.location} after step {folder.steps_done}")
            journal, extra = Journal(folder, tracker, listener), {"mlflow_run": tracker.run_id}
            try:
                with started(config, layers, roles, str(folder.store.location), extra) as processes:
                    for event in processes.events(listener.stopped):
                        journal.write(event)
            finally:
                folder.flush()
            trained = _finish(folder, tracker, time.perf_counter() - start, register)
        folder.begin({"finished": True})  # only now: the same command registers what a killed one has not
    return trained


def _finish(folder: RunFolder, tracker: Tracker, seconds: float, register: bool) -> TrainedEditor:
    """The newest checkpoint; with `register`, uploads it to MLflow and registers it."""
    checkpoint = latest_checkpoint(folder.store.location)
    state = read_state(checkpoint)
    registered = None
    if register:
        with RunStore(checkpoint).fetch(without=["optimizer.safetensors"]) as local:
            registered = tracker.register(local)
    return TrainedEditor(
        folder.store.location,
        checkpoint,
        state["step"],
        state["scores"],
        seconds,
        folder.history,
        tracker.run_id,
        registered,
    )


# --- what happens in a run -----------------------------------------------------------------------------------


class Journal:
    """Writes down a run's events."""

    def __init__(self, folder: RunFolder, tracker: Tracker, listener: Listener) -> None:
        self.folder, self.tracker, self.listener = folder, tracker, listener
        self.begun = False
        self.losses: Counter[str] = Counter()  # by role, since the newest step

    @property
    def step(self) -> int:
        """The newest step in the history."""
        return int(self.folder.history[-1]["step"]) if self.folder.history else 0

    def write(self, event: Event) -> None:
        """Handle one event. Steps and evaluations that are repeated after a loss count once."""
        match event:
            case events.Began(step) if not self.begun:
                # Later rows are those of steps that a killed driver did not save. Ranks that begin again repeat steps
                # that are written, to the same numbers.
                self.begun = True
                self.folder.cut(step)
                for row in self.folder.history:
                    self.tracker.log_row(row)
            case events.StepDone(step) if step > self.step:
                self._add(dict(vars(event)))
                self.losses.clear()
                report = StepReport(
                    event.generalization_loss,
                    event.locality_loss,
                    event.meta_loss,
                    event.locality_coef,
                    event.grad_norm,
                    event.seconds,
                )
                self.listener.step(step, report)
                if warning := no_progress(self.folder.history, self.folder.config):
                    self.listener.event(warning)
            case events.Evaluated(step, scores) if not self.folder.has_scores(step):
                self._add(dict(vars(event)))
                self.folder.flush()
                self.listener.evaluation(step, scores)
            case events.Saving():
                self.folder.flush()
            case events.Saved(step):
                check_shared(self.folder.store, step)
            case events.Lost(role, reason):
                self._count_loss(role, reason)
            case events.Remark(text):
                self.listener.event(text)
            case events.Failed(error):
                raise error

    def _add(self, row: dict[str, Any]) -> None:
        self.folder.add(row)
        self.tracker.log_row(row)

    def _count_loss(self, role: str, reason: str) -> None:
        self.losses[role] += 1
        limit = self.folder.config.cluster.max_failures
        if self.losses[role] > limit:
            raise EditError(
                f"{role} were lost {self.losses[role]} times before step {self.step + 1} was done, more than "
                f"cluster.max_failures={limit}; the last time: {reason}. The same command resumes the run from its "
                "last checkpoint"
            )
        self.listener.event(f"after step {self.step}: {role} were lost ({reason}); restoring them")


# --- its processes --------------------------------------------------------------------------------------------


@dataclass
class Processes:
    """The processes of a run: board and hypernet actors, which the loop knows, and LM workers."""

    roles: Roles
    loop: LoopSettings
    workers: LMWorkers

    def events(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """What happens until the LM workers are done; starts lost ones again. RunStopped if `stopped`, EditError if
        nothing happens for cluster.stall_seconds."""
        stall_seconds, last = self.loop.config.cluster.stall_seconds, time.monotonic()
        while True:
            running = self.workers.is_alive()
            taken = ray.get(self.loop.board.take.remote(), timeout=60)
            for event in taken:
                yield event
                last = time.monotonic()
            if not running and not taken:
                reason = self.workers.loss()
                if reason is None:
                    return
                yield events.Lost("LM workers", reason)
                self.workers, last = start_lm_workers(self.loop, self.roles), time.monotonic()
            if stopped():
                raise RunStopped("the run was stopped before its last step; the same command resumes it")
            if time.monotonic() - last > stall_seconds:
                activities = [*ray.get(self.loop.board.activities.remote(), timeout=60), *self.loop.group.status()]
                raise EditError(
                    f"nothing happened for cluster.stall_seconds={stall_seconds:g}; who does what: "
                    f"{'; '.join(activities)}"
                )
            if not taken:
                self.workers.join(0.1)

    def end_workers(self) -> None:
        """End the LM workers that still run: they return when they miss the actors and the board says why."""
        if self.workers.is_alive():
            with suppress(RayError):  # the board may be what is lost
                ray.get(self.loop.board.stop.remote(), timeout=60)
            self.loop.group.kill()
            self.workers.join(30)
            if self.workers.is_alive():
                logger.warning("the LM workers of %s have not ended within 30 seconds", self.loop.run)


@contextmanager
def started(
    config: Config, layers: list[LayerSpec], roles: Roles, run: str, extra: dict[str, Any]
) -> Iterator[Processes]:
    """Ask Ray for all processes, and end what is left of them after the block; `extra` goes into every checkpoint."""
    # On the driver's own node, so that no other node's loss can take it away.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board: Any = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
    with ExitStack() as at_end:
        at_end.callback(ray.kill, board)
        group = HypernetGroup.start(
            config, layers, run, resources=actor_options(roles.hypernet), threads=roles.hypernet_threads
        )
        at_end.callback(group.kill)
        loop = LoopSettings(config, group, board, run, roles.lm_threads, roles.overlap, extra)
        processes = Processes(roles, loop, start_lm_workers(loop, roles))
        at_end.callback(processes.end_workers)
        yield processes


class LMWorkers(threading.Thread):
    """The Ray Train run, followed by a thread of the driver. It ends when all workers have, or when one is lost."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="ray-train", daemon=True)
        self._trainer = trainer
        self._error: BaseException | None = None

    def run(self) -> None:
        """Called by `start`."""
        try:
            self._trainer.fit()
        except BaseException as error:  # noqa: BLE001 - `loss` gives it to the driver's thread
            self._error = error

    def loss(self) -> str | None:
        """Why they were lost; None if they ended well."""
        if self._error is None:
            return None
        if not isinstance(self._error, TrainingFailedError | RayError | RuntimeError):
            raise self._error
        return last_line(self._error)


def start_lm_workers(loop: LoopSettings, roles: Roles) -> LMWorkers:
    """All of them, in a new Ray Train run. They have no state to lose: they ask the actors where the run stands."""
    config, gpu = loop.config, bool(roles.lm.get("GPU"))
    if config.model.device == SPLIT:  # over a worker's own GPUs, and not over those of its neighbours on the node
        os.environ["TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES"] = "0"
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # relative paths of models and data mean what they do here
    # Ray Train's own notes, which hold no checkpoint: on this machine if the run is at a URL.
    elsewhere = Path(tempfile.gettempdir()) / f"malmen-ray-train-{os.getuid()}"
    store = RunStore(loop.run)
    notes = store.join(".ray_train") if store.is_local else elsewhere
    trainer = TorchTrainer(
        train_loop,
        # As a reference: Ray Train's controller would otherwise unpack it, and import all of transformers for nothing.
        train_loop_config={"loop": ray.put(loop)},
        scaling_config=ScalingConfig(
            num_workers=config.cluster.lm_workers, use_gpu=gpu, resources_per_worker=dict(roles.lm) or {"CPU": 0}
        ),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=int(config.cluster.stall_seconds)),
        # A new name each time: with the same one it would silently resume. No FailureConfig: Ray counts failures over
        # the whole run, and cluster.max_failures from step to step, so the driver counts.
        run_config=RunConfig(name=f"train-{os.getpid()}-{time.time_ns()}", storage_path=str(notes)),
    )
    workers = LMWorkers(trainer)
    workers.start()
    return workers


if __name__ == "__main__":
    from malmen.platform.cli.main import main

    main(["train"])
