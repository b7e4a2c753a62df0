"""Meta-training on a Ray cluster: `train(config, out)`, and the entry point of a Ray job.

The driver starts the processes of a run: the board, the hypernet actors (hypernet_group.py) and the LM workers
(lm_workers.py). Then it writes down their events (journal.py), starts lost LM workers again, and says who waits for
whom if nothing happens any more. No tensor passes through it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from malmen.config import Config, absolute_paths
from malmen.data.splits import check_held_out, data_fingerprint
from malmen.errors import EditError, RunStopped
from malmen.lm.layers import LayerSpec, find_layers
from malmen.lm.model import load_skeleton
from malmen.platform.board import Board
from malmen.platform.cluster import Roles, actor_options, check_room, connected, size_roles
from malmen.platform.events import Event, WorkersLost
from malmen.platform.hypernet_group import HypernetGroup
from malmen.platform.journal import Journal
from malmen.platform.journal import Listener as Listener
from malmen.platform.lm_workers import LMWorkers, start_lm_workers
from malmen.platform.places import check_lasting, in_ray_job
from malmen.platform.tracking.registry import RegisteredEditor, describe_checkpoint
from malmen.platform.tracking.tracker import Tracker
from malmen.platform.train_loop import LoopSettings
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
            _run(config, layers, roles, folder, tracker, listener)
            trained = _finish(config, folder, tracker, time.perf_counter() - start, register)
        folder.begin({"finished": True})  # only now: the same command registers what a killed one has not
    return trained


def _run(
    config: Config, layers: list[LayerSpec], roles: Roles, folder: RunFolder, tracker: Tracker, listener: Listener
) -> None:
    """Start the processes, write what happens until they are done, end what is left of them."""
    journal = Journal(folder, tracker, listener)
    with ExitStack() as at_end:
        at_end.callback(folder.flush)
        processes = Processes.start(config, layers, roles, str(folder.store.location), {"mlflow_run": tracker.run_id})
        at_end.callback(processes.end)
        for event in processes.events(listener.stopped):
            journal.write(event)


@dataclass
class Processes:
    """The processes of a run: its board, hypernet actors and LM workers."""

    board: Any  # handle of the Board actor
    group: HypernetGroup
    roles: Roles
    loop: LoopSettings
    workers: LMWorkers

    @classmethod
    def start(cls, config: Config, layers: list[LayerSpec], roles: Roles, run: str, extra: dict[str, Any]) -> Processes:
        """Ask Ray for all of them; `extra` goes into every checkpoint."""
        # On the driver's own node, so that no other node's loss can take it away.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board: Any = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
        with ExitStack() as unless_started:
            unless_started.callback(ray.kill, board)
            group = HypernetGroup.start(
                config, layers, run, resources=actor_options(roles.hypernet), threads=roles.hypernet_threads
            )
            unless_started.callback(group.kill)
            loop = LoopSettings(config, group, board, run, roles.lm_threads, roles.overlap, extra)
            processes = cls(board, group, roles, loop, start_lm_workers(loop, roles))
            unless_started.pop_all()
        return processes

    def events(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """What happens, until the LM workers are done; starts them again if they are lost.

        RunStopped if `stopped`, EditError if nothing happens for cluster.stall_seconds.
        """
        stall_seconds, last = self.loop.config.cluster.stall_seconds, time.monotonic()
        while True:
            running = self.workers.is_alive()
            events = ray.get(self.board.take.remote(), timeout=60)
            for event in events:
                yield event
                last = time.monotonic()
            if not running and not events:
                reason = self.workers.loss()
                if reason is None:
                    return
                yield WorkersLost(reason)
                self.workers, last = start_lm_workers(self.loop, self.roles), time.monotonic()
            if stopped():
                raise RunStopped("the run was stopped before its last step; the same command resumes it")
            if time.monotonic() - last > stall_seconds:
                activities = [*ray.get(self.board.activities.remote(), timeout=60), *self.group.status()]
                raise EditError(
                    f"nothing happened for cluster.stall_seconds={stall_seconds:g}; who does what: "
                    f"{'; '.join(activities)}"
                )
            if not events:
                self.workers.join(0.1)

    def end(self) -> None:
        """End what still runs: LM ranks return when they miss the actors and the board says why."""
        if self.workers.is_alive():
            with suppress(RayError):  # the board may be what is lost
                ray.get(self.board.stop.remote(), timeout=60)
            self.group.kill()
            self.workers.join(30)
            if self.workers.is_alive():
                logger.warning("the LM workers of %s have not ended within 30 seconds", self.loop.run)
        self.group.kill()
        ray.kill(self.board)


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
