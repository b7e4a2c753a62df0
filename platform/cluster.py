"""The Ray cluster of a run: connecting to it, and room in it for the run's roles, LM workers and hypernet actors."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group

from malmen.config import ClusterConfig, ModelConfig
from malmen.errors import EditError, UsageError


@dataclass(frozen=True)
class Roles:
    """The resources and threads of each process of a role."""

    lm: dict[str, float]  # Ray resources of an LM worker
    hypernet: dict[str, float]  # Ray resources of a hypernet actor
    lm_threads: int
    hypernet_threads: int
    overlap: bool  # whether LM workers and actors may work at the same time


@contextmanager
def connected(address: str | None, config: ClusterConfig) -> Iterator[bool]:
    """Connect to the cluster at `address` or of this Ray job; without either, start a local one for the block.

    Yields whether the cluster is such a local one.
    """
    # How soon the driver sees that workers have ended; Ray's default is 2 s.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    if ray.is_initialized():
        yield False
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _connect(address)
    else:
        _start_local(config)
    try:
        with redirect_stdout(sys.stderr):  # Ray prints warnings to stdout, where the results go
            yield not address
    finally:
        ray.shutdown()


def _start_local(config: ClusterConfig) -> None:
    needed = config.lm_workers * config.lm_cpus + config.hypernet_actors * config.hypernet_cpus
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; it warns without
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # one process less: a local node is not preempted
    # Ray warns above three times this number of processes; a run has more of them than a small machine has cores.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max(16, os.cpu_count() or 1)))
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15 every other process goes first
    if config.overlap:  # roles share cores: OpenMP threads that wait must not spin, which was eight times slower
        # The cluster's processes inherit it; a runtime_env would rule out prestarted ones.
        os.environ.update({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"})
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(needed)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RuntimeError, OSError) as error:
        raise EditError(f"a local Ray cluster cannot be started: {error}") from error


def _connect(address: str) -> None:
    _check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False)
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise EditError(
                "no Ray cluster runs on this machine (address `auto`); `ray start --head` starts one"
            ) from error
        raise EditError(
            f"the Ray cluster at {address!r} answers but refuses the connection: {' '.join(str(error).split())[:300]}; "
            "if it has token authentication, set RAY_AUTH_MODE=token here and put its token into ~/.ray/auth_token"
        ) from error


def _check_answers(address: str) -> None:
    """EditError at once if nothing listens there: Ray would try for minutes."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"cannot read the Ray address {address!r}: expected HOST:PORT, e.g. 10.0.0.1:6379, or `auto`")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise EditError(
            f"no Ray cluster answers at {address!r} ({error.strerror or error}); `ray start --head` prints its address"
        ) from error


def size_roles(config: ClusterConfig, model: ModelConfig, *, own: bool) -> Roles:
    """Resources as configured; where GPUs are left open, as many as the cluster has.

    `own`: the cluster is a local one for this run alone.
    """
    lm_gpus, hypernet_gpus = share_gpus(config, model, ray.cluster_resources().get("GPU", 0.0))
    for name, gpus, processes in (
        ("cluster.lm_gpus", lm_gpus, config.lm_workers),
        ("cluster.hypernet_gpus", hypernet_gpus, config.hypernet_actors),
    ):
        if processes > 1 and 0 < gpus < 1:
            raise UsageError(f"{name}={gpus:g} for {processes} processes: NCCL needs a whole GPU for each; use 1, or 0")
    cores = os.cpu_count() or 1
    shared_cores = own and not lm_gpus  # then overlap gains nothing: threads wait for each other
    return Roles(
        _resources(config.lm_cpus, lm_gpus, config.lm_resources),
        _resources(config.hypernet_cpus, hypernet_gpus, config.hypernet_resources),
        # On a cluster of our own the roles take turns, so each may have all cores; on another, what it asked for.
        max(1, cores // config.lm_workers if own else int(config.lm_cpus)),
        max(1, cores // config.hypernet_actors if own else int(config.hypernet_cpus)),
        not shared_cores if config.overlap is None else config.overlap,
    )


def share_gpus(config: ClusterConfig, model: ModelConfig, gpus: float) -> tuple[float, float]:
    """The GPUs of each LM worker and of each actor in a cluster with `gpus`; a run on the CPU takes none.

    One worker and one actor share the only card there is. UsageError for more LM workers than cards: they would be on
    the CPU unasked.
    """
    if model.device == "cpu":
        return 0.0, 0.0
    lm_gpus = config.lm_gpus
    unasked = config.lm_gpus is None and config.hypernet_gpus is None
    if unasked and gpus == config.lm_workers == config.hypernet_actors == 1:
        return 0.5, 0.5
    if lm_gpus is None and 0 < gpus < config.lm_workers:
        raise UsageError(
            f"cluster.lm_workers={config.lm_workers}, but the cluster has {gpus:g} GPUs: give as many workers at most, "
            "cluster.lm_gpus=1 if an autoscaler will add some, or cluster.lm_gpus=0 for the CPU"
        )
    if lm_gpus is None:
        lm_gpus = 1.0 if gpus >= config.lm_workers else 0.0
    hypernet_gpus = config.hypernet_gpus
    if hypernet_gpus is None:
        hypernet_gpus = 1.0 if gpus - lm_gpus * config.lm_workers >= config.hypernet_actors else 0.0
    return lm_gpus, hypernet_gpus


def on_own_device(model: ModelConfig, gpus: Sequence[str] | None = None) -> ModelConfig:
    """`auto` is a GPU only in a process that Ray has given one; others that the process sees belong to others."""
    given = on_given_gpu(model, gpus)
    return given if model.device == "auto" or given.device != "cpu" else model


def on_given_gpu(model: ModelConfig, gpus: Sequence[str] | None = None) -> ModelConfig:
    """A process that Ray has given no GPU is on the CPU, whatever `model.device` says of the language model.

    One that has a GPU is on that one: the number in `cuda:1` counts a machine's GPUs, so all processes would share it.
    """
    if gpus is None:
        if not ray.is_initialized():
            return model
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not gpus:
        return model.model_copy(update={"device": "cpu"})
    return model.model_copy(update={"device": "cuda"}) if model.device.startswith("cuda:") else model


def check_room(config: ClusterConfig, roles: Roles) -> None:
    """Wait, for a bounded time, until the cluster can hold all roles at once; an autoscaler sees the demand."""
    needed = [process for process in _processes(config, roles) if process]
    if not needed:  # any cluster holds processes that need nothing
        return
    group = placement_group(needed)
    try:
        ray.get(group.ready(), timeout=config.wait_seconds)
    except GetTimeoutError as error:
        raise EditError(_what_is_missing(config, roles)) from error
    finally:
        remove_placement_group(group)


def room_for_runs(
    config: ClusterConfig, roles: Roles, nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> int:
    """How many such runs fit at the same time: each process on one node, all within the free resources."""
    processes = _processes(config, roles)
    left, free_left, runs = [dict(node) for node in nodes], dict(free), 0
    while any(processes) and all(_reserve(process, left) and _reserve(process, [free_left]) for process in processes):
        runs += 1
    return max(1, runs)


def _processes(config: ClusterConfig, roles: Roles) -> list[dict[str, float]]:
    """The resources of each process of a run."""
    return [roles.lm] * config.lm_workers + [roles.hypernet] * config.hypernet_actors


def _reserve(bundle: Mapping[str, float], nodes: Sequence[dict[str, float]]) -> bool:
    """Take resources from the first node that has them; whether there is one."""
    for node in nodes:
        if all(node.get(name, 0.0) >= amount - 1e-9 for name, amount in bundle.items()):
            for name, amount in bundle.items():
                node[name] -= amount
            return True
    return False


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray resources as options of an actor."""
    rest = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": rest}


def describe_resources(resources: Mapping[str, float]) -> str:
    """For people; without Ray's own bookkeeping."""
    internal = ("node:", "object_store", "bundle", "accelerator_type")
    named = [
        f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if amount and not name.startswith(internal) and name != "memory" and "_group_" not in name
    ]
    return ", ".join(named) or "nothing"


def _resources(cpus: float, gpus: float, custom: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in {"CPU": cpus, "GPU": gpus, **custom}.items() if amount}


def _what_is_missing(config: ClusterConfig, roles: Roles) -> str:
    processes, existing = _processes(config, roles), ray.cluster_resources()
    lack = {
        name: sum(process.get(name, 0.0) for process in processes) - existing.get(name, 0.0)
        for name in {**roles.lm, **roles.hypernet}
    }
    missing = {name: amount for name, amount in lack.items() if amount > 0}
    why = "enough in total, but not free, or not on one node each"
    if missing:
        why = f"missing {describe_resources(missing)}"
    return (
        f"the cluster cannot hold this run within cluster.wait_seconds={config.wait_seconds:g}: {why}. "
        f"Needed are {config.lm_workers} LM workers of {describe_resources(roles.lm)} and {config.hypernet_actors} "
        f"hypernet actors of {describe_resources(roles.hypernet)}; the cluster has {describe_resources(existing)}, "
        f"free are {describe_resources(ray.available_resources())}. Change cluster.lm_workers, "
        "cluster.hypernet_actors or their cpus, gpus and resources, or add nodes"
    )
