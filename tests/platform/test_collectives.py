from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from malmen.config import load_config
from malmen.platform import collectives, train_loop
from malmen.platform.collectives import CollectiveTimeout, abort_groups, in_words, join_group
from malmen.platform.train_loop import LoopSettings
from malmen.shards import ProcessGroupShards

SECONDS = 3.0


def _wait(rank: int, port: int, whose: str, answer: Connection) -> None:
    """Rank 0 waits in a collective of all, or of a layer, that rank 1 never joins."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=60))
    join_group("gloo", store, rank, 2, SECONDS)
    shards = ProcessGroupShards({"layer": 8}, SECONDS)
    start = time.monotonic()
    if rank == 0:
        assert not abort_groups()  # gloo's end by themselves
        with pytest.raises(CollectiveTimeout) as error, in_words("solving step 3", SECONDS):
            if whose == "layer":
                shards.sum_tensor("layer", torch.ones(3))
            else:
                dist.all_reduce(torch.ones(3))
        answer.send((time.monotonic() - start, str(error.value)))
    time.sleep(60)


@pytest.mark.slow  # two processes import torch
@pytest.mark.parametrize("whose", ["all", "layer"])
def test_a_rank_whose_peer_never_joins_a_collective_hears_of_it_within_the_bound(whose: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    ranks = [context.Process(target=_wait, args=(rank, store.port, whose, theirs), daemon=True) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        assert mine.poll(60), "rank 0 waits for ever"
        waited, message = mine.recv()
    finally:
        for rank in ranks:
            rank.kill()
    assert SECONDS - 0.5 <= waited < SECONDS + 5
    assert message == ("solving step 3: another process has not joined a collective within 3 s, so it hangs or is lost")


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes") as error, in_words("solving", 3):
        raise RuntimeError("shapes differ")
    assert type(error.value) is RuntimeError
    with pytest.raises(CollectiveTimeout, match="solving: another process"), in_words("solving", 3):
        raise dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)")


def test_an_lm_rank_whose_peer_is_lost_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver hears the last line of what a rank raises, and starts the ranks again."""

    def lost(*_: object) -> None:
        raise RuntimeError("[unbound_buffer.cc:78] Timed out waiting 7000ms for recv operation to complete")

    config = load_config(None, ["cluster.stall_seconds=7"])
    loop = LoopSettings(config, None, None, "run", 1, False)  # type: ignore[arg-type]
    context = SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: 2)
    monkeypatch.setattr(train_loop, "get_context", lambda: context)
    monkeypatch.setattr(train_loop.ray, "get", lambda *_, **__: loop)
    monkeypatch.setattr(train_loop, "LMWorker", lost)
    with pytest.raises(CollectiveTimeout, match="LM rank 1: another process has not joined a collective within 7 s"):
        train_loop.train_loop({"loop": None})


# --- what is decided for NCCL, which never ran ---


def test_nccl_waits_where_an_exception_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str | None] = {}
    names = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def init_process_group(backend: str, **_: object) -> None:
        seen.update({name: os.environ.pop(name, None) for name in names}, backend=backend)

    monkeypatch.setattr(collectives.dist, "init_process_group", init_process_group)
    for backend, values in (("nccl", ("1", "0")), ("gloo", (None, None))):
        join_group(backend, dist.HashStore(), 0, 2, 3.0)
        assert (seen["backend"], *(seen[name] for name in names)) == (backend, *values)


def test_every_group_of_nccl_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self) -> None:
            aborted.append(self.name)

    world = {Group("all"): None, Group("layer"): None}
    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(collectives.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(collectives.dist.distributed_c10d, "_world", type("World", (), {"pg_map": world}))
    assert abort_groups() and aborted == ["all", "layer"]
