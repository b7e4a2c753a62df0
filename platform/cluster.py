"""The Ray cluster a run works on: connecting to it, and room in it for the run's roles."""

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

# Roles that work at the same time on the same cores: threads that wait must not spin, which was eight times slower.
_SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


@dataclass(frozen=True)
class Roles:
    """What each process of a role gets."""

    lm: dict[str, float]  # Ray resources of an LM worker
    hypernet: dict[str, float]  # Ray resources of a hypernet actor
    lm_threads: int
    hypernet_threads: int
    overlap: bool  # whether LM workers and actors may work at the same time


@contextmanager
def connected(address: str | None, config: ClusterConfig) -> Iterator[bool]:
    """Connected to the cluster at `address` (or of the Ray job we are in), else to a local one of our own.

    The value says whether it is our own; that one ends with the block.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # how soon the end of the workers is seen; 2 s
    if ray.is_initialized():
        yield False
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _connect(address)
    else:
        _start_local(config)
    try:
        with redirect_stdout(sys.stderr):  # Ray prints its warnings to where results go
            yield not address
    finally:
        ray.shutdown()


def _start_local(config: ClusterConfig) -> None:
    needed = config.lm_workers * config.lm_cpus + config.hypernet_actors * config.hypernet_cpus
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; it warns without
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # one process less: nobody preempts this node
    # Above three times this number of processes Ray complains, of which a run has more than a small machine has cores.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max(16, os.cpu_count() or 1)))
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets everything else go first, and everybody waits
    if config.overlap:  # a new cluster's processes inherit it; given as a runtime_env it would forbid prestarted ones
        os.environ.update(_SHARED_CORES)
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
            f"the Ray cluster at {address!r} answers but takes no connection: {' '.join(str(error).split())[:300]}; "
            "if it has token authentication, set RAY_AUTH_MODE=token here and put its token into ~/.ray/auth_token"
        ) from error


def _check_answers(address: str) -> None:
    """Ray tries for minutes where nothing listens; a socket knows at once."""
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
    """Resources by config; GPUs, where it leaves them open, as far as the cluster has them."""
    lm_gpus, hypernet_gpus = share_gpus(config, model, ray.cluster_resources().get("GPU", 0.0))
    _check_whole("cluster.lm_gpus", lm_gpus, config.lm_workers)
    _check_whole("cluster.hypernet_gpus", hypernet_gpus, config.hypernet_actors)
    cores = os.cpu_count() or 1
    shared_cores = own and not lm_gpus  # working at the same time then gains nothing, and threads wait for each other
    return Roles(
        _resources(config.lm_cpus, lm_gpus, config.lm_resources),
        _resources(config.hypernet_cpus, hypernet_gpus, config.hypernet_resources),
        # On a cluster of our own the roles take turns, so each may have all cores; on another, what it asked for.
        max(1, cores // config.lm_workers if own else int(config.lm_cpus)),
        max(1, cores // config.hypernet_actors if own else int(config.hypernet_cpus)),
        not shared_cores if config.overlap is None else config.overlap,
    )


def share_gpus(config: ClusterConfig, model: ModelConfig, gpus: float) -> tuple[float, float]:
    """Of a cluster's GPUs, those of each LM worker and of each actor; a run on the CPU takes none from others."""
    if model.device == "cpu":
        return 0.0, 0.0
    lm_gpus = config.lm_gpus
    if lm_gpus is None:
        lm_gpus = 1.0 if gpus >= config.lm_workers else 0.0
    hypernet_gpus = config.hypernet_gpus
    if hypernet_gpus is None:
        hypernet_gpus = 1.0 if gpus - lm_gpus * config.lm_workers >= config.hypernet_actors else 0.0
    return lm_gpus, hypernet_gpus


def _check_whole(name: str, gpus: float, processes: int) -> None:
    if processes > 1 and 0 < gpus < 1:
        raise UsageError(f"{name}={gpus:g} for {processes} processes: NCCL wants a whole GPU for each; use 1, or 0")


def on_own_device(model: ModelConfig, gpus: Sequence[str] | None = None) -> ModelConfig:
    """`auto` is a GPU only in a process that Ray has given one: those that it sees besides are others'."""
    given = on_given_gpu(model, gpus)
    return given if model.device == "auto" or given.device != "cpu" else model


def on_given_gpu(model: ModelConfig, gpus: Sequence[str] | None = None) -> ModelConfig:
    """A process that Ray has given no GPU is on the CPU, whatever `model.device` says of the language model.

    One that has a GPU is on that: the number in `cuda:1` counts a machine's, and each process would take the same.
    """
    if gpus is None:
        if not ray.is_initialized():
            return model
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not gpus:
        return model.model_copy(update={"device": "cpu"})
    return model.model_copy(update={"device": "cuda"}) if model.device.startswith("cuda:") else model


def check_room(config: ClusterConfig, roles: Roles) -> None:
    """Wait, for a bounded time, until the cluster can hold all roles at once; an autoscaler learns of the wish."""
    bundles = [roles.lm] * config.lm_workers + [roles.hypernet] * config.hypernet_actors
    if not any(bundles):  # a cluster holds any number of those who ask for nothing
        return
    group = placement_group([bundle for bundle in bundles if bundle])
    try:
        ray.get(group.ready(), timeout=config.wait_seconds)
    except GetTimeoutError as error:
        raise EditError(_what_is_missing(config, roles)) from error
    finally:
        remove_placement_group(group)


def room_for_runs(
    config: ClusterConfig, roles: Roles, nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> int:
    """How many such runs there is room for at the same time: each process on one node, all from what is free."""
    bundles = [roles.lm] * config.lm_workers + [roles.hypernet] * config.hypernet_actors
    if not any(bundles):
        return 1
    left, free_left, runs = [dict(node) for node in nodes], dict(free), 0
    while all(_take(bundle, left) and _take(bundle, [free_left]) for bundle in bundles):
        runs += 1
    return max(1, runs)


def _take(bundle: Mapping[str, float], places: Sequence[dict[str, float]]) -> bool:
    """From the first place that has it."""
    for place in places:
        if all(place.get(name, 0.0) >= amount - 1e-9 for name, amount in bundle.items()):
            for name, amount in bundle.items():
                place[name] -= amount
            return True
    return False


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray resources as options of an actor."""
    rest = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": rest}


def describe_resources(resources: Mapping[str, float]) -> str:
    """For people; without Ray's own bookkeeping."""
    shown = {
        name: amount
        for name, amount in sorted(resources.items())
        if amount and not name.startswith(("node:", "object_store", "bundle", "accelerator_type")) and name != "memory"
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items() if "_group_" not in name) or "nothing"


def _resources(cpus: float, gpus: float, custom: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in {"CPU": cpus, "GPU": gpus, **custom}.items() if amount}


def _what_is_missing(config: ClusterConfig, roles: Roles) -> str:
    total: dict[str, float] = {}
    for count, resources in ((config.lm_workers, roles.lm), (config.hypernet_actors, roles.hypernet)):
        for name, amount in resources.items():
            total[name] = total.get(name, 0.0) + count * amount
    there = ray.cluster_resources()
    missing = {name: amount - there.get(name, 0.0) for name, amount in total.items() if amount > there.get(name, 0.0)}
    why = (
        f"missing {describe_resources(missing)}" if missing else "enough in all, but not free, or not on one node each"
    )
    return (
        f"the cluster cannot hold this run within cluster.wait_seconds={config.wait_seconds:g}: {why}. "
        f"Needed are {config.lm_workers} LM workers of {describe_resources(roles.lm)} and {config.hypernet_actors} "
        f"hypernet actors of {describe_resources(roles.hypernet)}; the cluster has {describe_resources(there)}, "
        f"free are {describe_resources(ray.available_resources())}. Change cluster.lm_workers, "
        "cluster.hypernet_actors or their cpus, gpus and resources, or add nodes"
    )
