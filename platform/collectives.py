"""Collectives that end: a process that never joins one is an error for the others, not a wait for ever.

gloo raises in the waiting thread, by its timeout or when a peer closes its connection. NCCL's kernels wait on the GPU,
where no exception reaches them; so its calls block on the CPU, where its timeout is raised too, and a thread that does
not wait may abort them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


class CollectiveTimeout(RuntimeError):
    """A peer did not join a collective in time."""


def join_group(backend: str, store: dist.Store, world_rank: int, world_size: int, seconds: float) -> None:
    """Make torch's default process group; every collective of it ends within `seconds`."""
    if backend == "nccl":
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # waits on the CPU, and raises there
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # which would end the process instead, and θ with it
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=world_rank, world_size=world_size, timeout=timeout)


def abort_groups() -> bool:
    """Free the thread of this process that waits in a collective; whether there was one to abort.

    gloo cannot be aborted: its waits end when the peers leave.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return False
    for group in list(dist.distributed_c10d._world.pg_map):  # all groups, those of layers too
        group.abort()
    return True


@contextmanager
def in_words(doing: str, seconds: float) -> Iterator[None]:
    """A collective inside that timed out, said for people."""
    try:
        yield
    except RuntimeError as error:  # of torch's own kinds only DistBackendError, NCCL's, has a type
        text = str(error)
        if not (
            "Timed out waiting" in text or (isinstance(error, dist.DistBackendError) and "timeout" in text.lower())
        ):
            raise
        raise CollectiveTimeout(
            f"{doing}: another process has not joined a collective within {seconds:g} s, so it hangs or is lost"
        ) from error
