"""The hyper-network actors as one: started, given their shares of the work, and healed when one is lost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import Tensor

from malmen.config import Config
from malmen.errors import EditError
from malmen.lm.layers import LayerSpec
from malmen.lm.trace import Traces
from malmen.platform.cluster import describe_resources
from malmen.platform.hypernet_actor import HypernetActor
from malmen.platform.wire import Arrays, num_bytes, to_array, to_tensor
from malmen.shards import divide

_PATIENCE = 60.0  # seconds for an actor to leave its group; who does not is stuck, and is started again


class HypernetLost(RuntimeError):
    """An actor is gone, or did not answer: heal, and do the step again."""


@dataclass
class HypernetGroup:
    """Handles of the actors. It travels to every LM rank; one of them heals, all of them know the generation."""

    actors: list[Any]
    layers: list[LayerSpec]
    config: Config
    run: str  # where checkpoints go
    generation: str = ""
    bytes_sent: int = field(default=0)

    def __post_init__(self) -> None:
        self.plan = divide([layer.name for layer in self.layers], len(self.actors))

    @classmethod
    def start(
        cls, config: Config, layers: list[LayerSpec], run: str, *, resources: Mapping[str, Any], threads: int
    ) -> HypernetGroup:
        """Ask Ray for the actors. They come when there is room; the first `heal` waits for them."""
        remote = ray.remote(concurrency_groups={"status": 1})(HypernetActor).options(  # type: ignore[call-overload]
            max_restarts=-1,
            max_task_retries=0,  # a call that was lost may not be repeated before the group has healed
            scheduling_strategy="SPREAD",
            **resources,
        )
        actors = [remote.remote(config, layers, threads) for _ in range(config.cluster.hypernet_actors)]
        return cls(actors, layers, config, run)

    def put_moments(self, moments: Mapping[str, Tensor]) -> None:
        """The keys to preserve, to every actor, one layer after the other: E[u uᵀ] may be large."""
        for name, moment in moments.items():
            ref = ray.put(to_array(moment))
            self._get([actor.put_moment.remote(self.generation, name, ref) for actor in self.actors])

    # --- one step, from an LM rank ------------------------------------------------------------------------

    def put_traces(self, step: int, sender: int, traces: Traces) -> None:
        """(ii) Each actor gets its share of this rank's rows."""
        refs = []
        for actor, shares in zip(self.actors, self.plan, strict=True):
            parts: Arrays = {}
            for share in shares:
                found = traces[share.layer]
                rows = share.rows(len(found.keys))
                parts[f"{share.layer}/keys"] = to_array(found.keys[rows])
                parts[f"{share.layer}/value_grads"] = to_array(found.value_grads[rows])
            self.bytes_sent += num_bytes(parts)
            refs.append(actor.put_traces.remote(self.generation, step, sender, ray.put(parts)))
        self._get(refs)

    def solve(self, step: int, dtype: str) -> tuple[dict[str, Tensor], dict[str, float]]:
        """(iii) All shifts, and what the actors say about the solve."""
        answers = self._get([actor.solve.remote(self.generation, step, dtype) for actor in self.actors])
        refs = {name: ref for found, _ in answers for name, ref in found.items()}
        names = [layer.name for layer in self.layers]
        arrays = dict(zip(names, self._get([refs[name] for name in names]), strict=True))
        self.bytes_sent += num_bytes(arrays)
        count = sum(facts["residual_count"] for _, facts in answers)
        facts = {
            "seconds": max(facts["seconds"] for _, facts in answers),
            "mean_residual": sum(facts["residual_sum"] for _, facts in answers) / count if count else None,
        }
        return {name: to_tensor(array) for name, array in arrays.items()}, facts

    def put_grads(self, step: int, grads: Mapping[str, Tensor]) -> None:
        """(iv) Each layer's gradient to every actor that has tokens of it."""
        arrays = {name: to_array(grad) for name, grad in grads.items()}
        refs = []
        for actor, shares in zip(self.actors, self.plan, strict=True):
            mine = {share.layer: arrays[share.layer] for share in shares if share.layer in arrays}
            self.bytes_sent += num_bytes(mine)
            refs.append(actor.put_grads.remote(self.generation, step, ray.put(mine)))
        self._get(refs)

    def start_backward(self, step: int, told: Mapping[str, Any]) -> list[Any]:
        """(v)–(vii) without waiting: `finish` waits. What the ranks tell of the step goes into the actors' reports."""
        return [actor.backward.remote(self.generation, step, dict(told)) for actor in self.actors]

    def reports(self) -> list[dict[str, Any]]:
        """What the actors report of the last step they did since they were started."""
        return self._get([actor.report.remote(self.generation) for actor in self.actors])

    def finish(self, pending: Sequence[Any]) -> list[dict[str, Any]]:
        """What the actors report of the step, one by one."""
        return self._get(pending)

    def save(self, fingerprint: str, extra: Mapping[str, Any]) -> str:
        """A checkpoint, written by the first actor: all hold the same θ."""
        ref = self.actors[0].save.remote(self.generation, self.run, fingerprint, dict(extra))
        return str(self._get([ref])[0])

    def status(self) -> list[str]:
        """What each actor does, for people."""
        lines = []
        for index, actor in enumerate(self.actors):
            try:
                found = ray.get(actor.status.remote(), timeout=5)
                lines.append(f"hypernet actor {index}: {found['doing']} for {found['seconds']:.0f} s")
            except RayError as error:
                lines.append(f"hypernet actor {index}: does not answer ({type(error).__name__})")
        return lines

    # --- healing --------------------------------------------------------------------------------------------

    def heal(self, checkpoint: Callable[[], str | None]) -> int:
        """Make all actors equal, whatever happened: returns the number of steps they have done.

        All leave the process group (which frees those that wait for a lost one), meet in a new one, and who is
        fresh or behind takes the state of who is furthest. If all are fresh, they load the newest checkpoint.
        """
        deadline = time.monotonic() + self.config.cluster.wait_seconds
        self._each(lambda actor: actor.leave.remote(), deadline)
        states = self._each(lambda actor: actor.state.remote(), deadline)
        size, seconds = len(self.actors), self.config.cluster.wait_seconds
        address = ("", 0)
        if size > 1:
            address = self._get([self.actors[0].open_store.remote(size, seconds)])[0]
        generation = uuid.uuid4().hex
        self._get(
            [actor.join.remote(generation, rank, size, address, seconds) for rank, actor in enumerate(self.actors)]
        )
        self.generation = generation
        fresh = (-1, -1)
        done = [fresh if state["fresh"] else tuple(state["progress"]) for state in states]
        if max(done) == fresh:
            newest = checkpoint()
            return max(self._get([actor.load.remote(newest) for actor in self.actors]))
        source = done.index(max(done))
        behind = [actor for actor, steps in zip(self.actors, done, strict=True) if steps < max(done)]
        if behind:
            snapshot = self.actors[source].snapshot.remote()
            self._get([actor.restore.remote(snapshot) for actor in behind])
        return int(max(done)[0])

    def _each(self, call: Callable[[Any], Any], deadline: float) -> list[Any]:
        """One answer of every actor: of one that is coming back, as soon as it is there."""
        answers: dict[int, Any] = {}
        pending = {index: (call(actor), time.monotonic()) for index, actor in enumerate(self.actors)}
        while pending:
            ray.wait([ref for ref, _ in pending.values()], timeout=0.5)
            for index, (ref, since) in list(pending.items()):
                actor = self.actors[index]
                try:
                    answers[index] = ray.get(ref, timeout=0)
                    del pending[index]
                    continue
                except GetTimeoutError:
                    # Alone it waits for nobody, so it works; one that waits for its place in the cluster is not up.
                    alone = len(self.actors) == 1
                    if alone or time.monotonic() - since < _PATIENCE or not self._is_up(actor):
                        self._check_deadline(index, deadline)
                        continue
                    ray.kill(actor, no_restart=False)  # it hangs; a fresh one takes its place
                except RayActorError as error:  # it is being started again, unless it cannot even be made
                    if "creation task" in str(error):
                        raise EditError(f"hypernet actor {index} cannot be started: {_first_line(error)}") from error
                self._check_deadline(index, deadline)
                pending[index] = (call(actor), time.monotonic())
                time.sleep(0.1)  # between two asks, not to be sure of anything
        return [answers[index] for index in range(len(self.actors))]

    def _is_up(self, actor: Any) -> bool:
        """Whether it is there and could answer."""
        try:
            ray.get(actor.status.remote(), timeout=5)
        except RayError:
            return False
        return True

    def _check_deadline(self, index: int, deadline: float) -> None:
        if time.monotonic() > deadline:
            free = describe_resources(ray.available_resources())
            raise EditError(
                f"hypernet actor {index} was not there within cluster.wait_seconds="
                f"{self.config.cluster.wait_seconds:.0f}; free in the cluster is {free}"
            )

    def _get(self, refs: Sequence[Any]) -> list[Any]:
        try:
            return list(ray.get(list(refs), timeout=self.config.cluster.stall_seconds))
        except GetTimeoutError as error:
            seconds = self.config.cluster.stall_seconds
            raise EditError(
                f"no answer within cluster.stall_seconds={seconds:g}: {'; '.join(self.status())}"
            ) from error
        except EditError as error:  # raised by the editor in the actor: a message, not a failure of the machinery
            cause = getattr(error, "cause", error)
            raise EditError(str(cause)) from None
        except RayTaskError as error:
            raise HypernetLost(_first_line(error.cause if error.cause else error)) from error
        except RayError as error:
            raise HypernetLost(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
