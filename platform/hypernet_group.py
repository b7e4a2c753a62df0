"""The hyper-network actors as one: starts them, hands out their shares of the work, heals them when one is lost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import Tensor

from malmen.config import Config
from malmen.errors import EditError, last_line
from malmen.lm.layers import LayerSpec
from malmen.lm.trace import Traces
from malmen.platform.cluster import describe_resources
from malmen.platform.events import ActorReport
from malmen.platform.hypernet_actor import HypernetActor, Progress, Solution
from malmen.platform.wire import num_bytes, to_array, to_arrays, to_tensor
from malmen.shards import divide

_HANG_SECONDS = 60.0  # an actor that has not left its group after so long hangs, and is replaced


class HypernetLost(RuntimeError):
    """An actor is lost, or did not answer: heal, and do the step again."""


@dataclass
class HypernetGroup:
    """Handles of the actors. Every LM rank has a copy; rank 0 heals, and all know the generation."""

    actors: list[Any]
    layers: list[LayerSpec]
    config: Config
    run: str  # where checkpoints go
    generation: str = ""
    bytes_sent: int = 0

    def __post_init__(self) -> None:
        self.plan = divide([layer.name for layer in self.layers], len(self.actors))

    @classmethod
    def start(
        cls, config: Config, layers: list[LayerSpec], run: str, *, resources: Mapping[str, Any], threads: int
    ) -> HypernetGroup:
        """Ask Ray for the actors. They start when there is room; the first `heal` waits for them."""
        remote = ray.remote(concurrency_groups={"status": 1})(HypernetActor).options(  # type: ignore[call-overload]
            max_restarts=-1,
            max_task_retries=0,  # a call that was lost may not be repeated before the group has healed
            scheduling_strategy="SPREAD",
            **resources,
        )
        actors = [remote.remote(config, layers, threads) for _ in range(config.cluster.hypernet_actors)]
        return cls(actors, layers, config, run)

    def put_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Send E[u uᵀ] (terms, key, key) of the keys to preserve to all actors, layer by layer: it may be large."""
        for name, moment in moments.items():
            ref = ray.put(to_array(moment))
            self._get([actor.put_moment.remote(self.generation, name, ref) for actor in self.actors])

    # --- one step, from an LM rank ------------------------------------------------------------------------

    def put_traces(self, step: int | None, sender: int, traces: Traces) -> None:
        """(ii) Send each actor its share of this rank's rows; `step` is None for held-out edits. Empties `traces`,
        layer by layer."""
        refs = []
        for layer in list(traces):
            keys, value_grads = traces.pop(layer)
            for actor, shares in zip(self.actors, self.plan, strict=True):
                for rows in (share.rows(len(keys)) for share in shares if share.layer == layer):
                    parts = {f"{layer}/keys": to_array(keys[rows]), f"{layer}/value_grads": to_array(value_grads[rows])}
                    self.bytes_sent += num_bytes(parts)
                    refs.append(actor.put_traces.remote(self.generation, step, sender, ray.put(parts)))
        self._get(refs)

    def solve(self, step: int | None, dtype: str) -> tuple[dict[str, Tensor], float | None]:
        """(iii) All shifts (value, key), and the mean residual: None in training, and where there is no equation."""
        solutions: list[Solution] = self._get(
            [actor.solve.remote(self.generation, step, dtype) for actor in self.actors]
        )
        refs = {name: ref for solution in solutions for name, ref in solution.shifts.items()}
        arrays = dict(zip(refs, self._get(list(refs.values())), strict=True))
        self.bytes_sent += num_bytes(arrays)
        residuals = [residual for solution in solutions for residual in solution.residuals]
        return {name: to_tensor(array) for name, array in arrays.items()}, fmean(residuals) if residuals else None

    def put_grads(self, step: int, grads: Mapping[str, Tensor]) -> None:
        """(iv) Send each layer's gradient to every actor that has tokens of it."""
        arrays = to_arrays(grads)
        refs = []
        for actor, shares in zip(self.actors, self.plan, strict=True):
            mine = {share.layer: arrays[share.layer] for share in shares if share.layer in arrays}
            self.bytes_sent += num_bytes(mine)
            refs.append(actor.put_grads.remote(self.generation, step, ray.put(mine)))
        self._get(refs)

    def start_backward(self, step: int) -> list[Any]:
        """(v)–(vii) without waiting: `finish` waits."""
        return [actor.backward.remote(self.generation, step) for actor in self.actors]

    def finish(self, pending: Sequence[Any]) -> list[ActorReport]:
        """Wait for `start_backward`: the reports of the actors."""
        return self._get(pending)

    def reports(self) -> list[ActorReport | None]:
        """The actors' reports of the last step they did; None if they were all started again since."""
        return self._get([actor.report.remote(self.generation) for actor in self.actors])

    def save(self, fingerprint: str, extra: Mapping[str, Any]) -> None:
        """Have the first actor write a checkpoint: all hold the same θ."""
        self._get([self.actors[0].save.remote(self.generation, self.run, fingerprint, dict(extra))])

    def status(self) -> list[str]:
        """What each actor does, for people."""
        lines = []
        for index, actor in enumerate(self.actors):
            try:
                activity = ray.get(actor.status.remote(), timeout=5)
            except RayError as error:
                activity = f"does not answer ({type(error).__name__})"
            lines.append(f"hypernet actor {index}: {activity}")
        return lines

    def kill(self) -> None:
        """End the actors for good."""
        for actor in self.actors:
            ray.kill(actor)

    # --- healing --------------------------------------------------------------------------------------------

    def heal(self, checkpoint: Callable[[], str | None]) -> int:
        """Make all actors equal, whatever happened; returns the number of steps they have done.

        All leave the process group (which frees those that wait for a lost one) and meet in a new one. Then those that
        are fresh or behind take the state of the one that is furthest. If all are fresh, they load `checkpoint()`, the
        newest one, or the seeded start where it gives None.
        """
        progress = self._leave()
        size, seconds = len(self.actors), self.config.cluster.wait_seconds
        address = self._get([self.actors[0].open_store.remote(size, seconds)])[0] if size > 1 else None
        new = uuid.uuid4().hex
        self._get([actor.join.remote(new, rank, size, address, seconds) for rank, actor in enumerate(self.actors)])
        self.generation = new
        furthest = max((each for each in progress if each is not None), default=None)
        if furthest is None:
            newest = checkpoint()
            return max(self._get([actor.load.remote(newest) for actor in self.actors]))
        behind = [actor for actor, each in zip(self.actors, progress, strict=True) if each != furthest]
        if behind:
            snapshot = self.actors[progress.index(furthest)].snapshot.remote()
            self._get([actor.restore.remote(snapshot) for actor in behind])
        return furthest.steps_done

    def _leave(self) -> list[Progress | None]:
        """Have every actor leave the process group; one that Ray starts again is asked until it answers."""
        seconds = self.config.cluster.wait_seconds
        deadline = time.monotonic() + seconds
        answers: dict[int, Progress | None] = {}
        healing = uuid.uuid4().hex
        for actor in self.actors:
            actor.abort.remote(healing)
        pending = {index: (actor.leave.remote(healing), time.monotonic()) for index, actor in enumerate(self.actors)}
        while pending:
            ray.wait([ref for ref, _ in pending.values()], timeout=0.5)
            for index, (ref, since) in list(pending.items()):
                actor = self.actors[index]
                try:
                    answers[index] = ray.get(ref, timeout=0)
                    del pending[index]
                    continue
                except GetTimeoutError:
                    # A single actor waits for no peer, so it works; one that waits for room in the cluster is not up.
                    if len(self.actors) > 1 and time.monotonic() - since > _HANG_SECONDS and _is_up(actor):
                        ray.kill(actor, no_restart=False)  # it hangs; Ray starts a fresh one
                except RayActorError as error:  # Ray starts it again, unless its constructor fails
                    if "creation task" in str(error):
                        raise EditError(f"hypernet actor {index} cannot be started: {last_line(error)}") from error
                    time.sleep(0.1)  # between two calls; the answer decides
                    pending[index] = (actor.leave.remote(healing), time.monotonic())
                if time.monotonic() > deadline:
                    free = describe_resources(ray.available_resources())
                    raise EditError(
                        f"hypernet actor {index} did not start within cluster.wait_seconds={seconds:.0f}; the cluster "
                        f"has {free} free: add nodes or raise wait_seconds"
                    )
        return [answers[index] for index in range(len(self.actors))]

    def _get(self, refs: Sequence[Any]) -> list[Any]:
        try:
            return list(ray.get(list(refs), timeout=self.config.cluster.stall_seconds))
        except GetTimeoutError as error:
            seconds = self.config.cluster.stall_seconds
            raise EditError(
                f"no answer within cluster.stall_seconds={seconds:g}: {'; '.join(self.status())}"
            ) from error
        except EditError as error:  # raised by the editor in the actor: a message, not a failure of the machinery
            raise EditError(str(getattr(error, "cause", error))) from None
        except RayTaskError as error:
            raise HypernetLost(last_line(error.cause if error.cause else error)) from error
        except RayError as error:
            raise HypernetLost(last_line(error)) from error


def _is_up(actor: Any) -> bool:
    """Whether it runs and answers."""
    with suppress(RayError):
        ray.get(actor.status.remote(), timeout=5)
        return True
    return False
