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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--half", choices=("ray", "rest"), help="only the tests with Ray, or only those without")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    half = config.getoption("--half")
    if half is not None:
        left_out = [item for item in items if (item.get_closest_marker("ray") is not None) != (half == "ray")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


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
