"""What the tests of several rooms share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

SUPPORT = str(Path(__file__).parent / "support")
Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
LONG_GROUPS = ("chaos", "ray")  # marks


@cache
def group_of(file: str) -> str:
    """Which tests run in one process: with Ray all, so that they share a cluster; those that kill; else a file's."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((mark for mark in LONG_GROUPS if f"mark.{mark}" in text), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long groups first: a process that begins with one is busy to the end, the others share the files."""
    order = {
        file: LONG_GROUPS.index(group)
        for file in {file_of(item.nodeid) for item in items}
        if (group := group_of(file)) in LONG_GROUPS
    }
    items.sort(key=lambda item: order.get(file_of(item.nodeid), len(LONG_GROUPS)))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """For `-n`. xdist's own groups (--dist loadgroup) do nothing under pytest 9.2, whose node ids it cannot extend."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(file_of(nodeid))

    return Groups(config, log)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors are slower on several threads."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def malmen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`malmen ARGS…` in this process: exit code, standard output, standard error."""
    from malmen.platform.cli.main import main

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["malmen", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        code = stop.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray cluster for the whole session, with room for every test's roles."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # Ray's processes inherit it; as a runtime_env it would keep Ray from starting workers ahead of time.
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH")))))
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()
