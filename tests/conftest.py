"""What the tests of several rooms share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SUPPORT = str(Path(__file__).parent / "support")
Run = Callable[..., tuple[int, str, str]]
_LONG_GROUPS = ("chaos", "ray")  # marks


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, one process has all tests with Ray, so that they share one cluster, and another those that kill.

    The longest groups start first. All other files go to whoever is free, whole, so that a module's fixtures are made
    once.
    """

    def group(item: pytest.Item) -> str:
        kinds = (kind for kind in _LONG_GROUPS if item.get_closest_marker(kind) is not None)
        return next(kinds, str(item.path))

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: (*_LONG_GROUPS, group(item)).index(group(item)))  # stable: the rest stays in order


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
