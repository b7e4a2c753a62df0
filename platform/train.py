"""Meta-training on a Ray cluster: `train(config, out)`, and the entry point of a Ray job.

The driver starts the processes of a run: the board, the hypernet actors (hypernet_group.py) and the LM workers: a Ray
Train run whose processes hold a language model (lm_worker.py) and run the loop of train_loop.py. Then it writes down
their events (journal.py), starts lost LM workers again, and says who waits for whom if nothing happens any more. No
tensor passes through it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
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
from malmen.errors import EditError, RunStopped, last_line
from malmen.lm.layers import LayerSpec, find_layers
from malmen.lm.model import load_skeleton
from malmen.platform.cluster import Roles, actor_options, check_room, connected, size_roles
from malmen.platform.events import Board, Event, Lost
from malmen.platform.hypernet_group import HypernetGroup
from malmen.platform.journal import Journal
from malmen.platform.journal import Listener as Listener
from malmen.platform.places import check_lasting, in_ray_job, ray_train_folder
from malmen.platform.tracking.registry import RegisteredEditor, describe_checkpoint
from malmen.platform.tracking.tracker import Tracker
from malmen.platform.train_loop import LoopSettings, train_loop
from malmen.runs.checkpoint_lookup import read_state
from malmen.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)


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
    config: Config,
    out: str | Path,
    *,
    address: str | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    parent: str | None = None,
    register: bool = True,
    resolve_paths: bool = True,
) -> TrainedEditor:
    """Train an editor into `out`; an unfinished run of the same config there is resumed, to the same θ.

    `parent` is the MLflow run that this one belongs to, if any. `register`: put the editor into the model registry.
    `resolve_paths`: make relative paths absolute, because the workers have another working directory.
    """
    start, listener = time.perf_counter(), listener or Listener()
    check_held_out(config)
    # From the model's shape alone, so that a wrong name is an error now and not after the cluster has started.
    layers = find_layers(load_skeleton(config.model)[0], config.editor.layers, config.editor.ffn)
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
            trained = _finish(config, folder, tracker, time.perf_counter() - start, register)
        folder.begin({"finished": True})  # only now: the same command registers what a killed one has not
    return trained


@dataclass
class Processes:
    """The processes of a run: board and hypernet actors, which the loop knows, and LM workers."""

    roles: Roles
    loop: LoopSettings
    workers: LMWorkers

    def events(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """What happens, until the LM workers are done; starts them again if they are lost.

        RunStopped if `stopped`, EditError if nothing happens for cluster.stall_seconds.
        """
        stall_seconds, last = self.loop.config.cluster.stall_seconds, time.monotonic()
        while True:
            running = self.workers.is_alive()
            events = ray.get(self.loop.board.take.remote(), timeout=60)
            for event in events:
                yield event
                last = time.monotonic()
            if not running and not events:
                reason = self.workers.loss()
                if reason is None:
                    return
                yield Lost("LM workers", reason)
                self.workers, last = start_lm_workers(self.loop, self.roles), time.monotonic()
            if stopped():
                raise RunStopped("the run was stopped before its last step; the same command resumes it")
            if time.monotonic() - last > stall_seconds:
                activities = [*ray.get(self.loop.board.activities.remote(), timeout=60), *self.loop.group.status()]
                raise EditError(
                    f"nothing happened for cluster.stall_seconds={stall_seconds:g}; who does what: "
                    f"{'; '.join(activities)}"
                )
            if not events:
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
    board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
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
    trainer = TorchTrainer(
        train_loop,
        # As a reference: Ray Train's controller would otherwise unpack it, and import all of transformers for nothing.
        train_loop_config={"loop": ray.put(loop)},
        scaling_config=ScalingConfig(
            num_workers=config.cluster.lm_workers, use_gpu=gpu, resources_per_worker=dict(roles.lm) or {"CPU": 0}
        ),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=int(config.cluster.stall_seconds)),
        # Ray Train's own notes. A new name each time: with the same one it would silently resume. No FailureConfig:
        # Ray counts failures over the whole run, and cluster.max_failures from step to step, so the driver counts.
        run_config=RunConfig(name=f"train-{os.getpid()}-{time.time_ns()}", storage_path=ray_train_folder(loop.run)),
    )
    workers = LMWorkers(trainer)
    workers.start()
    return workers


def _finish(config: Config, folder: RunFolder, tracker: Tracker, seconds: float, register: bool) -> TrainedEditor:
    """The newest checkpoint; with `register`, uploads it to MLflow and registers it."""
    names = folder.store.checkpoints()
    if not names:
        raise EditError(f"the run ended without a checkpoint in {folder.store.location}")
    checkpoint = folder.store.join(names[-1])
    state = read_state(checkpoint)
    registered = None
    if register:
        with folder.store.fetch(names[-1], without=["optimizer.safetensors"]) as local:
            registered = tracker.register(local, *describe_checkpoint(local, config))
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


if __name__ == "__main__":
    from malmen.platform.cli.main import main

    main(["train"])
