"""Starts the LM workers: a Ray Train run whose processes each hold a language model (lm_worker.py) and run the loop of
train_loop.py."""

from __future__ import annotations

import os
import threading
import time

import ray
from ray.exceptions import RayError
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from malmen.config import SPLIT
from malmen.errors import last_line
from malmen.platform.cluster import Roles
from malmen.platform.places import ray_train_folder
from malmen.platform.train_loop import LoopSettings, train_loop


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
