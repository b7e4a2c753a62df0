"""What every LM rank runs under Ray Train: steps, evaluations and checkpoints, and going on after a loss."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.train import get_context

from malmen.config import Config
from malmen.data.splits import check_encodable, shared_facts, validation_records
from malmen.errors import EditError
from malmen.meta import StepReport
from malmen.platform.hypernet_actor import EVALUATION
from malmen.platform.hypernet_group import HypernetGroup, HypernetLost
from malmen.platform.lm_worker import LMWorker
from malmen.platform.meta_step import meta_step
from malmen.platform.places import check_shared
from malmen.platform.wire import peak_memory_mb
from malmen.runs.checkpoint import add_scores
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_state
from malmen.runs.storage import RunStore
from malmen.training import check_enough

logger = logging.getLogger(__name__)


@dataclass
class LoopSettings:
    """What the driver tells the ranks."""

    config: Config
    group: HypernetGroup
    board: Any  # handle of the Board actor
    run: str
    threads: int
    overlap: bool
    extra: dict[str, Any] = field(default_factory=dict)  # into every checkpoint


def train_loop(settings: Mapping[str, Any]) -> None:
    """Ray Train's entry. An EditError is a message for people: it ends the run instead of starting it again."""
    loop: LoopSettings = ray.get(settings["loop"], timeout=60)
    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(loop.threads)

    def note(doing: str) -> None:
        loop.board.note.remote(f"LM rank {rank}", f"{doing} (pid {os.getpid()})")

    try:
        Rank(loop, LMWorker(loop.config, rank, size, note)).run()
        note("done")
    except EditError as error:
        row = {"kind": "error", "message": str(error), "exit_code": error.exit_code}
        ray.get(loop.board.record.remote(row), timeout=60)


class Rank:
    """The loop of one rank."""

    def __init__(self, loop: LoopSettings, worker: LMWorker) -> None:
        self.loop, self.worker, self.group = loop, worker, loop.group
        self.training = loop.config.training
        self.evaluated = self.saved = -1
        wanted = self.training.eval_edits or self.training.num_edits
        self.records = check_enough(validation_records(loop.config), wanted)
        check_encodable(worker.encoder, self.records)
        if shared := shared_facts(loop.config, worker.sampler.records(0), self.records):
            self._record({"kind": "remark", "text": shared})

    def run(self) -> None:
        """Up to the last step, however often something is lost on the way."""
        step, traces, losses, furthest, restored = -1, None, 0, -1, False
        while True:
            try:
                if not restored:
                    step, traces = self._recover(), None
                    self._tell_where(step)
                    self._preserve(step)
                    restored = True
                if step > furthest:  # losses that are far apart end no run
                    furthest, losses = step, 0
                self._save_and_evaluate(step)
                if step >= self.training.steps:
                    return
                begin = time.perf_counter()
                stepped = meta_step(self.worker, self.group, step, traces, overlap=self.loop.overlap)
                self._record_step(step + 1, stepped.actors, stepped.seconds, time.perf_counter() - begin)
                step, traces = step + 1, stepped.ahead
            except HypernetLost as error:
                if self._stopped():  # that is why
                    return
                losses += 1
                if losses > self.loop.config.cluster.max_failures:
                    raise EditError(
                        f"hypernet actors were lost {losses} times before step {furthest + 1} was done, more than "
                        f"cluster.max_failures={self.loop.config.cluster.max_failures}; the last time: {error}"
                    ) from error
                logger.warning("step %d: %s; healing", step, error)
                self._record({"kind": "lost", "step": step, "why": str(error)})
                restored = False

    def _stopped(self) -> bool:
        """Whether the driver wants no more of the run; all ranks hear the same."""
        first = self.worker.world_rank == 0
        asked = ray.get(self.loop.board.stopped.remote(), timeout=60) if first else False
        return any(self.worker.gather(asked))

    def _tell_where(self, step: int) -> None:
        """Where the run goes on. The actors may have ended a step that whoever was lost then told nobody of."""
        self._record({"kind": "begins", "step": step})
        with self.worker.together("asking for the last step"):
            reports = self.group.reports() if self.worker.world_rank == 0 else []
        if all(report["step"] == step - 1 for report in reports):
            self._record_step(step, reports, {}, None)

    def _preserve(self, step: int) -> None:
        """Tell the actors which keys to preserve, when a run begins; later a peer or a checkpoint does."""
        if step or not self.loop.config.editor.preserving:
            return
        self.worker.note("reading the texts whose keys are preserved")
        for moments in self.worker.key_moments():
            with self.worker.together("sending the keys to preserve"):
                if self.worker.world_rank == 0:
                    self.group.put_moments(moments)

    def _recover(self) -> int:
        """All actors equal and ready; all ranks know the step they are at."""
        step = -1
        for _ in range(self.loop.config.cluster.max_failures + 1):
            try:
                with self.worker.together("restoring the hypernet actors"):
                    if self.worker.world_rank == 0:
                        step = self.group.heal(self._newest_checkpoint)
            except HypernetLost as error:
                logger.warning("healing failed: %s; once more", error)
                continue
            found = (step, self.group.generation, self._saved_step() if self.worker.world_rank == 0 else -1)
            step, self.group.generation, self.saved = self.worker.gather(found)[0]
            return step
        raise EditError("the hypernet actors could not be brought together; see the log of the Ray cluster")

    def _saved_step(self) -> int:
        store = RunStore(self.loop.run)
        names = store.checkpoints()
        return int(read_state(store.join(names[-1]))["step"]) if names else -1

    def _is_due(self, step: int) -> bool:
        """Whether held-out records are measured after this step."""
        every = self.training.eval_every
        return step >= self.training.steps or bool(every and step and step % every == 0)

    def _newest_checkpoint(self) -> str | None:
        if not RunStore(self.loop.run).checkpoints():
            return None
        checkpoint = latest_checkpoint(self.loop.run)
        trained_for = read_state(checkpoint)["base_model"]
        if trained_for != self.worker.fingerprint:
            raise EditError(
                f"the editor in {checkpoint} was trained for base model {trained_for}; this one is "
                f"{self.worker.fingerprint}: an editor works only on the weights it was trained for"
            )
        return str(checkpoint)

    def _save_and_evaluate(self, step: int) -> None:
        """In this order: an evaluation that fails costs no steps. What is measured is saved too, so that the best is
        never lost."""
        due = self._is_due(step)
        if step and (due or step % self.training.checkpoint_every == 0) and self.saved != step:
            with self.worker.together(f"saving step {step}"):
                if self.worker.world_rank == 0:
                    self._record({"kind": "saving", "step": step})
                    self._wait_for_the_driver()
                    path = self.group.save(self.worker.fingerprint, self.loop.extra)
                    self._record({"kind": "checkpoint", "step": step, "path": path})
                    check_shared(RunStore(self.loop.run), step)
            self.saved = step
        if due and self.evaluated != step:
            scores = self._evaluate()
            memory = self.worker.gather(peak_memory_mb())
            self._record({"kind": "evaluation", "step": step, "scores": scores, "lm_memory": memory})
            with self.worker.together(f"saving the scores of step {step}"):
                if self.worker.world_rank == 0:
                    self._wait_for_the_driver()
                    add_scores(self.loop.run, step, scores, keep=self.training.keep_checkpoints)
            self.evaluated = step

    def _wait_for_the_driver(self) -> None:
        """Until it has written all that happened. A run that goes on from a checkpoint does nothing again that was done
        before it, so what the history lacks then, it lacks for ever."""
        patience = self.loop.config.cluster.stall_seconds / 2  # the other ranks wait for this one, no longer than that
        end = time.monotonic() + patience
        while not ray.get(self.loop.board.written.remote(), timeout=60):
            if ray.get(self.loop.board.stopped.remote(), timeout=60):
                raise HypernetLost("the driver wants no more of the run")
            if time.monotonic() > end:
                logger.warning("the driver has written nothing for %g s; its history may lack steps", patience)
                return
            time.sleep(0.02)

    def _evaluate(self) -> dict[str, Any]:
        facts = [self.worker.encoder.encode(record.edit) for record in self.records]
        self.worker.note("tracing held-out edits")
        traces = self.worker.trace(facts, cached=False)
        with self.worker.together("sending held-out traces"):
            self.group.put_traces(EVALUATION, self.worker.world_rank, traces)
        with self.worker.together("waiting for the shifts of held-out edits"):
            shifts, solved = self.group.solve(EVALUATION, self.worker.shift_dtype)
        self.worker.note("measuring held-out edits")
        return self.worker.evaluate(self.records, shifts, solved["mean_residual"]).scores()

    def _record_step(
        self, step: int, actors: list[dict[str, Any]], seconds: Mapping[str, float], wall: float | None
    ) -> None:
        """The driver drops what it has heard already. `seconds` are what the ranks have measured since they told."""
        if not actors:  # only rank 0 asks them
            return
        first, told = actors[0], actors[0]["told"]
        generalization, locality = told["losses"]
        stages = {**told["seconds"], **seconds}
        for stage in ("hypernet", "adam"):
            stages[stage] = max(report["seconds"][stage] for report in actors)
        meta_loss = generalization + self.training.locality_coef * locality
        report = StepReport(generalization, locality, meta_loss, first["grad_norm"], stages)
        self._record(
            {
                "kind": "step",
                "step": step,
                **vars(report),
                "wall": sum(stages.values()) if wall is None else wall,
                "damping": first["damping"],
                "edit_lr": first["edit_lr"],
                "bytes_moved": told["bytes_moved"],
                "hypernet_memory": [actor["memory"] for actor in actors],
                "cache_mb": round(sum(cache.used_bytes for cache in set(self.worker.caches.values())) / 2**20, 1),
            }
        )

    def _record(self, row: dict[str, Any]) -> None:
        """On the board before anything else is begun: the actors know of the last step only."""
        if self.worker.world_rank == 0:
            ray.get(self.loop.board.record.remote(row), timeout=60)
