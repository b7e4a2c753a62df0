"""An Editor in a process of its own: the hyper-network actor.

It holds one shard of the tokens (malmen/shards.py) and no algorithm of its own. Every call names the generation of
the group it was made for and the step it belongs to: a call of an earlier generation is refused, a call that was
already carried out changes nothing. An actor that Ray has started again knows that it is fresh, and refuses to work
until it is restored. Steps count from 0; the step `None` stands for held-out edits, outside training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from malmen.config import Config
from malmen.editor import Editor, Solved, seeded_editor
from malmen.lm.devices import exhausted, peak_memory_mb, resolve_device
from malmen.lm.layers import LayerSpec
from malmen.lm.products import use_float32_products
from malmen.lm.trace import LayerTrace, Traces
from malmen.meta import Stopwatch
from malmen.platform.cluster import on_given_gpu
from malmen.platform.collectives import abort_groups, in_words, join_group
from malmen.platform.events import ActorReport
from malmen.platform.wire import Arrays, to_array, to_arrays, to_tensor
from malmen.runs.checkpoint import load_editor, save_checkpoint
from malmen.shards import ProcessGroupShards, Shards


class Progress(NamedTuple):
    """How far an actor is; the larger one is further."""

    steps_done: int
    observed: bool  # whether its normalisers have seen the next step's tokens; unlike the rest that cannot be undone


@dataclass(frozen=True)
class Snapshot:
    """All that a fresh actor needs to equal the one it is taken of."""

    editor: Arrays
    optimizer: Arrays
    progress: Progress
    report: ActorReport | None


@dataclass(frozen=True)
class Solution:
    """An actor's part of a solve."""

    shifts: dict[str, Any]  # references to S* (value, key), of the layers that this actor leads
    residuals: list[float]  # of its tokens; none in training, which needs no residuals


class StaleCall(RuntimeError):
    """A call for another generation of the group, or to an actor that is not restored yet."""


class HypernetActor:
    """Editor + process group. One thread does the work; `status` answers beside it."""

    def __init__(self, config: Config, layers: list[LayerSpec], threads: int) -> None:
        torch.set_num_threads(threads)
        use_float32_products(config.model)
        self.config, self.layers = config, layers
        self.device = resolve_device(on_given_gpu(config.model))
        torch.backends.cuda.matmul.allow_tf32 = config.editor.tf32  # slices stay exact: TF32 holds integers up to 2¹¹
        self.editor: Editor = seeded_editor(layers, config).to(self.device)
        self.fresh = True
        self.generation: str | None = None
        self._store: dist.TCPStore | None = None
        self._report: ActorReport | None = None
        self._observed = False  # see Progress
        self._traces: dict[int | None, dict[int, Arrays]] = {}  # by step and sender
        self._solutions: dict[int | None, Solution] = {}  # by step, of the newest one only
        self._grads: dict[int, Arrays] = {}  # by step
        self._solved: Solved | None = None
        self._activity = ("waiting to be restored", time.time())
        self._left: str | None = None  # the healing that it left the group for
        self._patience = config.cluster.stall_seconds / 2  # actors heal before their run counts as hanging

    # --- joining, leaving, restoring ------------------------------------------------------------------

    @ray.method(concurrency_group="status")
    def abort(self, healing: str) -> None:
        """End a collective in which the working thread waits, so that `leave` need not wait behind it."""
        if self._left != healing:  # a late call must not end those of the next group
            abort_groups()

    def leave(self, healing: str) -> Progress | None:
        """Leave the process group, so that peers waiting for it fail at once; how far it is, None if it is fresh."""
        self._left = healing
        self.generation, self.editor.shards = None, Shards()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        self._forget()
        return None if self.fresh else self._progress()

    def open_store(self, world_size: int, seconds: float) -> tuple[str, int]:
        """Open the store through which the actors meet: its host and port. Called on the first actor only."""
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(
            host, 0, world_size, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        return host, self._store.port

    def join(
        self, generation: str, world_rank: int, world_size: int, address: tuple[str, int] | None, seconds: float
    ) -> None:
        """Join a new process group; a single actor needs none, and no address."""
        if address is not None:
            timeout = timedelta(seconds=seconds)
            store = self._store or dist.TCPStore(*address, world_size, is_master=False, timeout=timeout)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            join_group(backend, store, world_rank, world_size, self._patience)
            features = {layer.name: layer.key_size + layer.value_size for layer in self.layers}
            self.editor.shards = ProcessGroupShards(features, self._patience)
        self.generation = generation

    def load(self, checkpoint: str | None) -> int:
        """Load θ, Adam and normalisers of a checkpoint, or the seeded start without one; returns the steps done."""
        shards = self.editor.shards
        if checkpoint is None:
            self.editor = seeded_editor(self.layers, self.config)
        else:
            self.editor = load_editor(checkpoint, optimizer=True)
            self.editor.config = self.config
        self.editor.to(self.device).shards = shards
        self.editor.load_optimizer_state(self.editor.optimizer_state())  # Adam's state goes where θ went
        self._forget()
        self._observed = self.fresh = False
        return self.editor.steps_done

    def snapshot(self) -> Snapshot:
        """Its state, for `restore` of a peer."""
        if self.fresh:
            raise StaleCall("it was lost after it left the group")
        editor, optimizer = to_arrays(self.editor.state_dict()), to_arrays(self.editor.optimizer_state())
        return Snapshot(editor, optimizer, self._progress(), self._report)

    def restore(self, snapshot: Snapshot) -> None:
        """Become a peer's equal."""
        self.editor.load_state_dict({name: to_tensor(array) for name, array in snapshot.editor.items()})
        self.editor.load_optimizer_state({name: to_tensor(array) for name, array in snapshot.optimizer.items()})
        self.editor.steps_done, self._observed = snapshot.progress
        self._report = snapshot.report
        self._forget()
        self.fresh = False

    def put_moment(self, generation: str, layer: str, moment: Any) -> None:
        """E[u uᵀ] (terms, key, key) of the keys to preserve in a layer. Every actor holds those of all layers: the
        first one saves them."""
        self._check(generation)
        self.editor.preserve({layer: to_tensor(moment)})

    # --- one step ---------------------------------------------------------------------------------------

    def put_traces(self, generation: str, step: int | None, sender: int, parts: Arrays) -> None:
        """(ii) Keys and value gradients of one LM rank, as `layer/keys` and `layer/value_grads`; of some layers at a
        time."""
        self._check(generation)
        self._solutions.pop(step, None)
        self._traces.setdefault(step, {}).setdefault(sender, {}).update(parts)

    def solve(self, generation: str, step: int | None, dtype: str) -> Solution:
        """(iii) The shifts of the layers that this actor leads; computed once, however many ranks ask."""
        self._check(generation)
        if step not in self._solutions:
            with self._note("solving held-out edits" if step is None else f"solving step {step}"):
                traces = self._join_traces(self._traces.pop(step))
                if step is not None and not self._observed:
                    assert step == self.editor.steps_done, (step, self.editor.steps_done)
                    self.editor.observe(traces)
                    self._observed = True
                self._solved = self.editor.solve(traces, training=step is not None)
                led = {name: shift for name, shift in self._solved.shifts.items() if self.editor.shards.leads(name)}
                shifts = {name: ray.put(to_array(shift.to(getattr(torch, dtype)))) for name, shift in led.items()}
                residuals = self._solved.residuals().tolist() if step is None else []
                self._solutions = {step: Solution(shifts, residuals)}
        return self._solutions[step]

    def put_grads(self, generation: str, step: int, grads: Arrays) -> None:
        """(iv) ∇_W̃ L_meta (value, key) of some layers, summed over all LM ranks."""
        self._check(generation)
        self._grads.setdefault(step, {}).update(grads)

    def backward(self, generation: str, step: int) -> ActorReport:
        """(v)–(vii) Pullback, proxy loss in batches, sum of θ's gradient over the actors, Adam; done once."""
        self._check(generation)
        if step == self.editor.steps_done:
            with self._note(f"back-propagating step {step}"):
                self._report = self._backward(self._grads.pop(step))
        assert self._report is not None and self._report.step == step + 1, (self._report, step)
        return self._report

    def _backward(self, arrays: Arrays) -> ActorReport:
        watch = Stopwatch()
        with watch("hypernet"):
            assert self._solved is not None, f"step {self.editor.steps_done} was not solved"
            grads = {name: to_tensor(array, self.device) for name, array in arrays.items()}
            self.editor.zero_grad(set_to_none=True)
            self.editor.backward(self._solved, grads)
        with watch("adam"):
            self.editor.step()
        self._solutions.clear()
        self._solved, self._observed = None, False
        return ActorReport(
            self.editor.steps_done,
            self.editor.last_grad_norm,
            self.editor.damping(),
            self.editor.edit_lr(),
            watch.seconds,
            peak_memory_mb(),
        )

    def report(self, generation: str) -> ActorReport | None:
        """Of the last step that it, or the peer it was restored from, has done."""
        self._check(generation)
        return self._report

    def save(self, generation: str, run: str, fingerprint: str, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint of the steps that are done."""
        self._check(generation)
        with self._note(f"saving step {self.editor.steps_done}"):
            keep = self.config.training.keep_checkpoints
            save_checkpoint(run, self.editor, fingerprint, keep=keep, extra=extra)

    @ray.method(concurrency_group="status")
    def status(self) -> str:
        """What it does and for how long, for people; answers while it works."""
        activity, since = self._activity
        return f"{activity} for {time.time() - since:.0f} s"

    # --- pieces -----------------------------------------------------------------------------------------

    def _check(self, generation: str) -> None:
        if self.fresh or generation != self.generation:
            raise StaleCall(f"a call of generation {generation} reached generation {self.generation}")

    def _progress(self) -> Progress:
        return Progress(self.editor.steps_done, self._observed)

    def _forget(self) -> None:
        """Drop what belongs to a step under way."""
        self._traces.clear()
        self._solutions.clear()
        self._grads.clear()
        self._solved = None

    def _join_traces(self, parts: dict[int, Arrays]) -> Traces:
        """The rows of all senders, in the order of their ranks."""
        names = [key.removesuffix("/keys") for key in parts[min(parts)] if key.endswith("/keys")]

        def rows(key: str) -> Tensor:
            return to_tensor(np.concatenate([parts[sender].pop(key) for sender in sorted(parts)]), self.device)

        return {name: LayerTrace(rows(f"{name}/keys"), rows(f"{name}/value_grads")) for name in names}

    @contextmanager
    def _note(self, activity: str) -> Iterator[None]:
        """What it does inside. No memory or no disk is no loss of the actor: repeating would not help."""
        self._activity = (activity, time.time())
        try:
            with in_words(activity, self._patience):
                yield
        except (RuntimeError, MemoryError, OSError) as error:
            if message := exhausted(error):
                raise message from error
            raise
        finally:
            self._activity = (f"idle after {activity}", time.time())
