"""An Editor in a process of its own: the hyper-network actor.

It holds one shard of the tokens (malmen/shards.py) and no algorithm of its own. Every call names the generation of
the group it was made for and the step it belongs to: a call of an earlier generation is refused, a call that was
already carried out changes nothing. An actor that Ray has started again knows that it is fresh, and refuses to work
until it is restored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from malmen.config import Config
from malmen.editor import Editor, Solved, seeded_editor
from malmen.lm.devices import resolve_device
from malmen.lm.layers import LayerSpec
from malmen.lm.trace import LayerTrace, Traces
from malmen.platform.cluster import on_given_gpu
from malmen.platform.wire import Arrays, peak_memory_mb, to_array, to_arrays, to_tensor
from malmen.runs.checkpoint import load_editor, save_checkpoint
from malmen.shards import ProcessGroupShards, Shards

EVALUATION = -1  # the step that stands for an edit outside training
NOTHING = -2


class StaleCall(RuntimeError):
    """A call for another generation of the group, or to an actor that is not restored yet."""


class HypernetActor:
    """Editor + process group. One thread does the work; `status` answers beside it."""

    def __init__(self, config: Config, layers: list[LayerSpec], threads: int) -> None:
        torch.set_num_threads(threads)
        self.config, self.layers = config, layers
        self.device = resolve_device(on_given_gpu(config.model))
        self.editor: Editor = seeded_editor(layers, config).to(self.device)
        self.fresh = True
        self.generation: str | None = None
        self._store: dist.TCPStore | None = None
        self._report: dict[str, Any] = {"step": NOTHING}  # of the last step
        self._observed = NOTHING  # the last step that the normalisers have seen; unlike the rest it cannot be undone
        self._traces: dict[int, dict[int, Arrays]] = {}  # by step and sender
        self._shifts: dict[int, tuple[dict[str, Any], dict[str, float]]] = {}
        self._grads: dict[int, Arrays] = {}
        self._solved: Solved | None = None
        self._doing = ("waiting to be restored", time.time())

    # --- joining, leaving, restoring ------------------------------------------------------------------

    def leave(self) -> None:
        """Out of the process group. It closes the connections, so peers that wait for this actor fail at once."""
        self.generation, self.editor.shards = None, Shards()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        self._forget()

    def open_store(self, world_size: int, seconds: float) -> tuple[str, int]:
        """Where the others meet: host and port, called on the first actor only."""
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(
            host, 0, world_size, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        return host, self._store.port

    def join(self, generation: str, world_rank: int, world_size: int, address: tuple[str, int], seconds: float) -> None:
        """Into a new process group."""
        if world_size > 1:
            timeout = timedelta(seconds=seconds)
            store = self._store or dist.TCPStore(*address, world_size, is_master=False, timeout=timeout)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=world_rank, world_size=world_size, timeout=timeout)
            features = {layer.name: layer.key_size + layer.value_size for layer in self.layers}
            self.editor.shards = ProcessGroupShards(features)
        self.generation = generation

    def state(self) -> dict[str, Any]:
        """How far it is: the steps it has done, and the last one that its normalisers have seen."""
        return {"fresh": self.fresh, "progress": (self.editor.steps_done, self._observed)}

    def load(self, checkpoint: str | None) -> int:
        """θ, Adam and normalisers of a checkpoint; without one, the seeded beginning."""
        shards = self.editor.shards
        if checkpoint is None:
            self.editor = seeded_editor(self.layers, self.config)
        else:
            self.editor = load_editor(checkpoint, optimizer=True)
            self.editor.config = self.config
        self.editor.to(self.device).shards = shards
        self.editor.load_optimizer_state(self.editor.optimizer_state())  # Adam's state goes where θ went
        self._forget()
        self._observed = NOTHING
        self.fresh = False
        return self.editor.steps_done

    def snapshot(self) -> dict[str, Any]:
        """All that a fresh actor needs to be this one's equal."""
        return {
            "editor": to_arrays(self.editor.state_dict()),
            "optimizer": to_arrays(self.editor.optimizer_state()),
            "steps_done": self.editor.steps_done,
            "observed": self._observed,
            "report": self._report,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Become a peer's equal."""
        self.editor.load_state_dict({name: to_tensor(array) for name, array in snapshot["editor"].items()})
        self.editor.load_optimizer_state({name: to_tensor(array) for name, array in snapshot["optimizer"].items()})
        self.editor.steps_done = snapshot["steps_done"]
        self._forget()
        self._observed, self._report = snapshot["observed"], snapshot["report"]
        self.fresh = False

    def put_moment(self, generation: str, layer: str, moment: Any) -> None:
        """E[u uᵀ] of the keys to preserve in a layer. All actors hold all layers', for the first one saves them."""
        self._check(generation)
        self.editor.preserve({layer: to_tensor(moment)})

    # --- one step ---------------------------------------------------------------------------------------

    def put_traces(self, generation: str, step: int, sender: int, parts: Arrays) -> None:
        """(ii) Keys and value gradients of one LM rank, as `layer/keys` and `layer/value_grads`."""
        self._check(generation)
        self._shifts.pop(step, None)
        self._traces.setdefault(step, {})[sender] = parts

    def solve(self, generation: str, step: int, dtype: str) -> tuple[dict[str, Any], dict[str, float]]:
        """(iii) The shifts of the layers that this actor leads, as references; computed once, however often asked."""
        self._check(generation)
        if step not in self._shifts:
            with self._note(f"solving step {step}"):
                begin = time.perf_counter()
                training = step != EVALUATION
                traces = self._gather(self._traces.pop(step))
                if training and self._observed != step:
                    self.editor.observe(traces)
                    self._observed = step
                self._solved = self.editor.solve(traces, training=training)
                led = {name: shift for name, shift in self._solved.shifts.items() if self.editor.shards.leads(name)}
                wanted = getattr(torch, dtype)
                refs = {name: ray.put(to_array(shift.to(wanted))) for name, shift in led.items()}
                residuals = () if training else self._solved.residuals().tolist()  # a training step asks for none
                facts = {
                    "residual_sum": float(sum(residuals)),
                    "residual_count": float(len(residuals)),
                    "seconds": time.perf_counter() - begin,
                }
                self._shifts = {step: (refs, facts)}
        return self._shifts[step]

    def put_grads(self, generation: str, step: int, grads: Arrays) -> None:
        """(iv) ∇_W̃ L_meta of some layers, summed over all LM ranks."""
        self._check(generation)
        self._grads.setdefault(step, {}).update(grads)

    def backward(self, generation: str, step: int, told: dict[str, Any]) -> dict[str, Any]:
        """(v)–(vii) Pullback, proxy loss in batches, sum of θ's gradient over the actors, Adam.

        The report of the step holds what the ranks have told of it, for those who come after a rank is lost.
        """
        self._check(generation)
        if step == self.editor.steps_done:
            with self._note(f"back-propagating step {step}"):
                begin = time.perf_counter()
                assert self._solved is not None, f"step {step} was not solved"
                grads = {name: to_tensor(array, self.device) for name, array in self._grads.pop(step).items()}
                self.editor.zero_grad(set_to_none=True)
                self.editor.backward(self._solved, grads)
                middle = time.perf_counter()
                self.editor.step()
                self._shifts.clear()
                self._solved = None
                self._report = {
                    "step": step,
                    "told": told,
                    "grad_norm": self.editor.last_grad_norm,
                    "damping": self.editor.damping(),
                    "edit_lr": self.editor.edit_lr(),
                    "seconds": {"hypernet": middle - begin, "adam": time.perf_counter() - middle},
                    "memory": peak_memory_mb(),
                }
        assert self._report["step"] == step, (self._report["step"], step)
        return self._report

    def report(self, generation: str) -> dict[str, Any]:
        """Of the last step."""
        self._check(generation)
        return self._report

    def save(self, generation: str, run: str, fingerprint: str, extra: Mapping[str, Any]) -> str:
        """A checkpoint of the step that is done."""
        self._check(generation)
        with self._note(f"saving step {self.editor.steps_done}"):
            keep = self.config.training.keep_checkpoints
            return str(save_checkpoint(run, self.editor, fingerprint, keep=keep, extra=extra))

    @ray.method(concurrency_group="status")
    def status(self) -> dict[str, Any]:
        """What it does and since when; answers while it works."""
        doing, since = self._doing
        return {
            "doing": doing,
            "seconds": time.time() - since,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        }

    # --- pieces -----------------------------------------------------------------------------------------

    def _check(self, generation: str) -> None:
        if self.fresh or generation != self.generation:
            raise StaleCall(f"a call of generation {generation} reached generation {self.generation}")

    def _forget(self) -> None:
        """Drop what belongs to a step under way."""
        self._traces.clear()
        self._shifts.clear()
        self._grads.clear()
        self._solved = None

    def _gather(self, parts: dict[int, Arrays]) -> Traces:
        """The rows of all senders, in their order."""
        names = [key.removesuffix("/keys") for key in parts[min(parts)] if key.endswith("/keys")]

        def rows(key: str) -> Tensor:
            return to_tensor(np.concatenate([parts[sender][key] for sender in sorted(parts)]), self.device)

        return {name: LayerTrace(rows(f"{name}/keys"), rows(f"{name}/value_grads")) for name in names}

    @contextmanager
    def _note(self, doing: str) -> Iterator[None]:
        self._doing = (doing, time.time())
        try:
            yield
        finally:
            self._doing = (f"idle after {doing}", time.time())
