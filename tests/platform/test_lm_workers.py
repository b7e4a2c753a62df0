"""LM workers that are lost, or cannot go on: all of them end, and the driver knows why."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chaos import mortal_actor, mortal_loop, unreadable_loop
from platform_runs import make_platform_config
from ray.train import WorkerGroupError

from malmen.errors import EditError
from malmen.platform.train import Listener, LMWorkers, train


class Fit:
    """A trainer that ends in some way."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def fit(self) -> None:
        if self.error is not None:
            raise self.error


def ended(error: BaseException | None) -> LMWorkers:
    workers = LMWorkers(Fit(error))  # type: ignore[arg-type]
    workers.start()
    workers.join(60)
    return workers


def test_a_loss_is_the_last_line_of_what_ray_says() -> None:
    assert ended(None).loss() is None
    assert ended(WorkerGroupError("rank 0:\n  CUDA out of memory\n", {})).loss() == "CUDA out of memory"
    assert ended(RuntimeError("a worker failed:\n  CUDA out of memory\n")).loss() == "CUDA out of memory"


def test_an_error_that_is_no_loss_is_raised() -> None:
    with pytest.raises(ValueError, match="no such option"):
        ended(ValueError("no such option")).loss()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_storage_that_rank_0_cannot_read_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is rank 0 that reads; the other must not wait for it until Ray Train gives it up."""
    monkeypatch.setattr("malmen.platform.train.train_loop", unreadable_loop())
    config = make_platform_config("gpt2", tmp_path, cluster={"lm_workers": 2})
    with pytest.raises(EditError, match="the storage cannot be read"):
        train(config, tmp_path / "run")
    assert "ray-train" not in {thread.name for thread in threading.enumerate()}  # that is: Ray Train's run has ended


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("role", ["LM workers", "hypernet actors"])
def test_max_failures_counts_the_losses_between_two_steps(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one allowed: two losses at different steps are survived, two at the same step end the run."""
    if role == "LM workers":
        monkeypatch.setattr("malmen.platform.train.train_loop", mortal_loop([1, 3], 4, tmp_path))
    else:
        monkeypatch.setattr("malmen.platform.hypernet_group.HypernetActor", mortal_actor([1, 3], 4, tmp_path))
    cluster = {"hypernet_actors": 2, "max_failures": 1}
    config = make_platform_config("gpt2", tmp_path, training={"steps": 8, "checkpoint_every": 1}, cluster=cluster)
    steps: list[int] = []
    messages: list[str] = []
    expected = rf"{role} were lost 2 times before step 5 was done, more than cluster.max_failures=1; the last time: "
    with pytest.raises(EditError, match=expected):
        train(config, tmp_path / "run", listener=Listener(lambda step, _: steps.append(step), event=messages.append))
    assert steps == [1, 2, 3, 4]
    losses = [message.partition(f": {role} were lost")[0] for message in messages if "were lost" in message]
    assert losses == ["after step 1", "after step 3", "after step 4"]
