"""What every LM rank runs under Ray Train: steps, evaluations and checkpoints, and restoring lost actors."""

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
from malmen.errors import EditError, check_base_model
from malmen.lm.devices import exhausted, peak_memory_mb
from malmen.lm.trace import Traces
from malmen.lm_side import MetaLosses
from malmen.platform import events
from malmen.platform.collectives import in_words
from malmen.platform.hypernet_group import HypernetGroup, HypernetLost
from malmen.platform.lm_worker import LMWorker
from malmen.platform.meta_step import meta_step
from malmen.platform.places import check_shared
from malmen.runs.checkpoint import add_scores
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_state
from malmen.runs.storage import RunStore
from malmen.training import check_enough

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopSettings:
    """What a rank needs to know of its run."""

    config: Config
    group: HypernetGroup
    board: Any  # handle of the Board actor
    run: str  # its folder or URL
    threads: int
    overlap: bool
    extra: dict[str, Any] = field(default_factory=dict)  # goes into every checkpoint


def train_loop(settings: Mapping[str, Any]) -> None:
    """Runs in each LM worker process that Ray Train starts (train.py). An EditError is a message for people, and so is
    what is said of a node without memory or disk: it ends the run. Any other error makes the driver start the LM
    workers again."""
    loop: LoopSettings = ray.get(settings["loop"], timeout=60)
    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(loop.threads)

    def note(activity: str) -> None:
        loop.board.note.remote(f"LM rank {rank}", f"{activity} (pid {os.getpid()})")

    try:
        with in_words(f"LM rank {rank}", loop.config.cluster.stall_seconds):
            Rank(loop, LMWorker(loop.config, rank, size, note)).run()
        note("done")
    except (EditError, RuntimeError, MemoryError, OSError) as error:
        message = error if isinstance(error, EditError) else exhausted(error)
        if message is None:
            raise
        ray.get(loop.board.post.remote(events.Failed(message)), timeout=60)


class Rank:
    """The loop of one LM rank."""

    def __init__(self, loop: LoopSettings, worker: LMWorker) -> None:
        self.loop, self.worker, self.group, self.board = loop, worker, loop.group, loop.board
        self.training = loop.config.training
        self.first = worker.world_rank == 0  # rank 0 speaks for all: to the driver, the board and the storage
        self.evaluated: int | None = None  # the step that was evaluated last
        self.saved: int | None = None  # the step of the newest checkpoint
        self.records = check_enough(
            validation_records(loop.config), self.training.eval_edits or self.training.num_edits
        )
        check_encodable(worker.encoder, self.records)
        shared = shared_facts(loop.config, worker.sampler.records(0), self.records)
        for remark in filter(None, (shared, worker.lm.slow_place())):
            self._post(events.Remark(remark))

    def run(self) -> None:
        """Train up to the last step. Lost actors are restored; the driver ends the run if that happens too often."""
        step: int | None = None  # steps done; None: the actors must be restored first
        traces: Traces | None = None
        while True:
            try:
                if step is None:
                    step, traces = self._restore(), None
                self._save_and_evaluate(step)
                if step >= self.training.steps:
                    return
                done, traces = meta_step(
                    self.worker, self.group, step, traces, overlap=self.loop.overlap, keep=self._keep
                )
                if done is not None:
                    self._post(done)
                step += 1
            except HypernetLost as error:
                if self._stopped():  # the driver has ended the actors
                    return
                logger.warning("after step %s: %s; restoring the hypernet actors", step, error)
                self._post(events.Lost("hypernet actors", str(error)))
                step = None

    # --- restoring ----------------------------------------------------------------------------------------

    def _restore(self) -> int:
        """Make all actors equal and ready; returns the steps they have done, on all ranks."""
        place: tuple[int, str, int | None, float] | None = None
        with self.worker.together("restoring the hypernet actors"):
            if self.first:  # what reads the storage stands in `together`: its errors reach all ranks
                step = self.group.heal(self._newest_checkpoint)
                self._restore_locality_coef(step)
                place = (step, self.group.generation, self._saved_step(), self.worker.locality_coef)
        agreed = self.worker.gather(place)[0]
        assert agreed is not None
        step, self.group.generation, self.saved, self.worker.locality_coef = agreed
        self._post(events.Began(step))
        with self.worker.together("asking for the last step"):
            if self.first:
                self._complete(step)
        self._preserve(step)
        return step

    def _complete(self, step: int) -> None:
        """Post the last step if the ranks were lost before they did; the driver drops it if it has it."""
        lm, actors = self._ask(self.board.kept), self.group.reports()
        reports = [report for report in actors if report is not None and report.step == step]
        if lm is not None and lm.step == step and len(reports) == len(actors):
            self._post(events.StepDone.join(lm, reports, {}))

    def _preserve(self, step: int) -> None:
        """Send the actors the keys to preserve, when a run starts; later they come from a peer or a checkpoint."""
        if step or not self.loop.config.editor.preserving:
            return
        self.worker.note("reading the texts whose keys are preserved")
        for moments in self.worker.preserved_moments(self.worker.sampler.preserved()):
            with self.worker.together("sending the keys to preserve"):
                if self.first:
                    self.group.put_moments(moments)

    def _restore_locality_coef(self, step: int) -> None:
        """λ_loc after so many steps: as the newest step's report has it, else as the newest checkpoint does."""
        lm, coef = self._ask(self.board.kept), self.training.locality_coef
        if lm is not None and lm.step in (step, step + 1):
            self.worker.locality_coef = lm.locality_coef
            if lm.step == step:
                losses = MetaLosses(lm.generalization_loss, lm.locality_loss)
                self.worker.adjust_locality_coef(losses, self.worker.sampler.batch(step - 1))
        else:
            self.worker.locality_coef = read_state(self.loop.run).get("locality_coef", coef) if step else coef

    def _saved_step(self) -> int | None:
        run = self.loop.run
        return int(read_state(run)["step"]) if RunStore(run).checkpoints() else None

    def _newest_checkpoint(self) -> str | None:
        if not RunStore(self.loop.run).checkpoints():
            return None
        checkpoint = latest_checkpoint(self.loop.run)
        trained_for = read_state(checkpoint)["base_model"]
        check_base_model(f"the editor in {checkpoint}", trained_for, self.worker.fingerprint)
        return str(checkpoint)

    # --- saving and evaluating ----------------------------------------------------------------------------

    def _save_and_evaluate(self, step: int) -> None:
        """Save first: an evaluation that fails costs no steps. What is evaluated is saved too, so that the best
        editor is never lost."""
        every = self.training.eval_every
        due = step >= self.training.steps or bool(every and step and step % every == 0)
        if step and (due or step % self.training.checkpoint_every == 0) and self.saved != step:
            with self.worker.together(f"saving step {step}"):
                if self.first:
                    self._post(events.Saving(step))
                    self._wait_for_the_driver()
                    coef = {"locality_coef": self.worker.locality_coef}
                    self.group.save(self.worker.fingerprint, {**self.loop.extra, **coef})
                    self._post(events.Saved(step))
                    check_shared(RunStore(self.loop.run), step)
            self.saved = step
        if due and self.evaluated != step:
            scores = self._evaluate()
            self._post(events.Evaluated(step, scores, self.worker.gather(peak_memory_mb())))
            with self.worker.together(f"saving the scores of step {step}"):
                if self.first:
                    self._wait_for_the_driver()
                    add_scores(self.loop.run, step, scores, keep=self.training.keep_checkpoints)
            self.evaluated = step

    def _evaluate(self) -> dict[str, Any]:
        facts = [self.worker.encoder.encode(record.edit) for record in self.records]
        self.worker.note("tracing held-out edits")
        traces = self.worker.trace(facts, cached=False)
        with self.worker.together("sending held-out traces"):
            self.group.put_traces(None, self.worker.world_rank, traces)
        with self.worker.together("waiting for the shifts of held-out edits"):
            shifts, mean_residual = self.group.solve(None, self.worker.shift_dtype)
        self.worker.note("measuring held-out edits")
        return self.worker.evaluate(self.records, shifts, mean_residual).scores()

    # --- the driver ---------------------------------------------------------------------------------------

    def _wait_for_the_driver(self) -> None:
        """Until it has written all events. A run that is resumed from a checkpoint repeats nothing that happened before
        it, so what the history lacks then, it lacks for ever."""
        limit = self.loop.config.cluster.stall_seconds / 2  # the other ranks wait for this one, no longer than that
        deadline = time.monotonic() + limit
        while not self._ask(self.board.written):
            if self._ask(self.board.stopped):
                raise HypernetLost("the driver ends the run")
            if time.monotonic() > deadline:
                logger.warning("the driver has written nothing for %g s; its history may lack steps", limit)
                return
            time.sleep(0.02)

    def _stopped(self) -> bool:
        """Whether the driver ends the run; all ranks get the same answer."""
        return any(self.worker.gather(self.first and self._ask(self.board.stopped)))

    def _keep(self, report: events.LMReport) -> None:
        if self.first:
            self._ask(self.board.keep, report)

    def _post(self, event: events.Event) -> None:
        """Return when it is on the board: the actors know of the last step only."""
        if self.first:
            self._ask(self.board.post, event)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        return ray.get(method.remote(*arguments), timeout=60)
