"""A run's folder that only some nodes see: an error at the first checkpoint, not a run that begins again."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import ray
from platform_runs import UnreadBoard, make_platform_config

from malmen.errors import EditError
from malmen.lm.layers import find_layers
from malmen.lm.model import load_skeleton
from malmen.platform.hypernet_group import HypernetGroup
from malmen.platform.lm_worker import LMWorker
from malmen.platform.places import check_shared
from malmen.platform.train_loop import LoopSettings, Rank
from malmen.runs.storage import RunStore


def _save(run: Path, step: int) -> None:
    with RunStore(run).publish(f"checkpoint-{step:07d}") as folder:
        (folder / "state.json").write_text("{}")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malmen.platform.places.VISIBLE_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_checkpoint_that_this_node_does_not_see_is_an_error_that_names_place_and_node(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    with pytest.raises(EditError, match=rf"step 2 was written to {tmp_path}, but node {socket.gethostname()} .*--out"):
        check_shared(RunStore(tmp_path), 2)


@pytest.mark.usefixtures("impatient")
def test_a_checkpoint_is_seen_also_when_a_later_one_has_taken_its_place(tmp_path: Path) -> None:
    for saved in (2, 10_000_000):
        _save(tmp_path, saved)
        check_shared(RunStore(tmp_path), 2)
    check_shared(RunStore(tmp_path), 9_999_999)


def test_a_shared_file_system_may_show_a_checkpoint_late(tmp_path: Path) -> None:
    late = threading.Timer(0.2, _save, (tmp_path, 2))
    late.start()
    check_shared(RunStore(tmp_path), 2)
    late.join()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster", "impatient")
def test_a_rank_that_does_not_see_the_checkpoints_of_the_actors_ends_the_run(tmp_path: Path) -> None:
    """The actors write elsewhere, as on a node where the same path is another disk. The rank is this process."""
    config = make_platform_config("gpt2", tmp_path)
    layers = find_layers(load_skeleton(config.model)[0], config.editor.layers, config.editor.ffn)
    group = HypernetGroup.start(config, layers, str(tmp_path / "there"), resources={"num_cpus": 0.1}, threads=1)
    board = ray.remote(UnreadBoard).options(num_cpus=0).remote()
    loop = LoopSettings(config, group, board, str(tmp_path / "here"), 1, False)
    try:
        with pytest.raises(EditError, match=r"step 2 was written to .*here, but node"):
            Rank(loop, LMWorker(config, 0, 1, lambda _doing: None)).run()
    finally:
        for actor in (*group.actors, board):
            ray.kill(actor)
    assert RunStore(tmp_path / "there").checkpoints() == ["checkpoint-0000002"]
