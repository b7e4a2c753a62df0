"""Small runs of the platform in float64, beside the same runs in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from model_folders import write_model, write_records
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from malmen.config import Config
from malmen.lm.layers import find_layers
from malmen.lm.model import load_skeleton
from malmen.platform.events import Board, Evaluated, Event, Remark, StepDone
from malmen.platform.hypernet_group import HypernetGroup
from malmen.platform.lm_worker import LMWorker
from malmen.platform.train import TrainedEditor
from malmen.platform.train_loop import LoopSettings, Rank
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_state

END = Remark("this run has ended")


class UnreadBoard(Board):
    """No driver reads it before the end, and no rank waits for that."""

    def written(self) -> bool:
        return True


def make_platform_config(kind: str, folder: Path, **changes: dict[str, Any]) -> Config:
    """Three steps of five edits in two blocks, with a model and records of this kind in `folder`."""
    model, records = folder / kind, folder / f"{kind}.jsonl"
    if not records.exists():
        write_model(kind, model)
        write_records(kind, records)
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "dtype": "float64", "device": "cpu"},
        "editor": {"layers": "last:2", "rank": 5, "edit_lr": 0.01, "parametrisation": "relative"},
        "training": {"num_edits": 5, "steps": 3, "meta_lr": 1e-2, "checkpoint_every": 2, "locality_coef": 0.7},
        "data": {"train": str(records), "validation": str(records), "format": "malmen"},
        "batch": {"token_budget": 40, "hypernet_rows": 7},
        "cluster": {"lm_cpus": 0.5, "hypernet_cpus": 0.25, "wait_seconds": 150, "stall_seconds": 150},
        "tracking": {"enabled": False},
    }
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values}
    return Config.model_validate(settings)


def train_in_turn(
    configs: Mapping[str, Config], out: Path, board_type: type[Board] = UnreadBoard
) -> dict[str, TrainedEditor]:
    """Do what `train` does, for several configs in turn on the same Ray Train workers, whose start takes most of such a
    run's time; a single rank runs in this process. All configs must have the same number of LM workers."""
    board = ray.remote(board_type).options(num_cpus=0).remote()
    groups, loops = {}, []
    try:
        for name, config in configs.items():
            layers = find_layers(load_skeleton(config.model)[0], config.editor.layers, config.editor.ffn)
            group = HypernetGroup.start(config, layers, str(out / name), resources={"num_cpus": 0.1}, threads=1)
            groups[name] = group
            loops.append(LoopSettings(config, group, board, str(out / name), 1, bool(config.cluster.overlap)))
        (workers,) = {config.cluster.lm_workers for config in configs.values()}
        if workers == 1:
            _run_loops(loops, 0, 1)
        else:
            TorchTrainer(
                _ranks,
                train_loop_config={"loops": ray.put(loops)},
                scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
                torch_config=TorchConfig(backend="gloo", timeout_s=120),
                run_config=RunConfig(name="in-turn", storage_path=str(out / ".ray_train")),
            ).fit()
        events = ray.get(board.take.remote(), timeout=60)
    finally:
        for actor in (board, *(actor for group in groups.values() for actor in group.actors)):
            ray.kill(actor)
    trained = {}
    for name in configs:
        checkpoint = latest_checkpoint(out / name)
        state = read_state(checkpoint)
        end = events.index(END)
        history = history_rows(events[:end])
        trained[name] = TrainedEditor(out / name, checkpoint, state["step"], state["scores"], 0.0, history)
        del events[: end + 1]
    return trained


def history_rows(events: list[Event]) -> list[dict[str, Any]]:
    """What a driver writes of these events."""
    return [dict(vars(event)) for event in events if isinstance(event, StepDone | Evaluated)]


def _ranks(settings: Mapping[str, Any]) -> None:
    loops = ray.get(settings["loops"], timeout=60)
    _run_loops(loops, get_context().get_world_rank(), get_context().get_world_size())


def _run_loops(loops: list[LoopSettings], rank: int, size: int) -> None:
    """What `train_loop` does, for each of the runs."""
    for loop in loops:
        Rank(loop, LMWorker(loop.config, rank, size, lambda _doing: None)).run()
        if rank == 0:
            ray.get(loop.board.post.remote(END), timeout=60)
