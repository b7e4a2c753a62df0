"""Large requests, one after the other, whatever becomes of one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from endpoints import make_bench, world_facts

from malmen.lm.model import LanguageModel
from malmen.serve.ledger.jobs import Job
from malmen.serve.messages import Change
from malmen.serve.writing.writer import JobRunner

FACTS = tuple(world_facts(12))


def finished(runner: JobRunner, name: str) -> Job:
    """A job as it ended."""
    ends = time.monotonic() + 60
    while (job := runner.book.get(name)).state not in ("done", "failed"):
        assert time.monotonic() < ends and runner.alive(), job
        time.sleep(0.02)  # between two looks; the wait is bounded above
    return job


def test_a_job_that_the_memory_does_not_hold_fails_and_the_next_one_is_done(
    tmp_path: Path, little_memory: Callable[[LanguageModel, int], AbstractContextManager[None]]
) -> None:
    bench = make_bench(tmp_path)
    runner = JobRunner(bench.service())
    with little_memory(bench.lm, 4):
        large = runner.book.add(Change("ann", FACTS[:8]))
        small = runner.book.add(Change("ann", FACTS[8:]))
        runner.wake()
        failed, done = finished(runner, large.id), finished(runner, small.id)
    runner.close()
    assert failed.state == "failed" and failed.result is not None and failed.result["status"] == 422
    assert "8 facts" in failed.result["detail"] and "send smaller parts" in failed.result["detail"]
    assert done.state == "done" and done.result is not None and done.result["num_facts"] == 4
