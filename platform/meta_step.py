"""One meta-training step on the cluster: the seven stages of the paper's Fig. 3, as every LM rank runs them."""

from __future__ import annotations

import time
from collections.abc import Callable

from malmen.lm.trace import Traces
from malmen.meta import Stopwatch, naming_records
from malmen.platform.events import LMReport, StepDone
from malmen.platform.hypernet_group import HypernetGroup
from malmen.platform.lm_worker import LMWorker


def meta_step(
    worker: LMWorker, group: HypernetGroup, step: int, traces: Traces | None, *, overlap: bool,
    keep: Callable[[LMReport], None],
) -> tuple[StepDone | None, Traces | None]:  # fmt: skip
    """Algorithm 2 and the Adam step. LM ranks and actors work in turn, except that with `overlap` the ranks trace the
    next step's edits while the actors back-propagate this one's: traces depend on the frozen weights only, so that is
    exact. `keep` gets the LM side's report before the actors end the step: no rank may be left to hear of the end.

    Returns the finished step, on rank 0 only, and the traces of the next one if there are any.
    """
    begin = time.perf_counter()
    watch, batch, sent_before = Stopwatch(), worker.sampler.batch(step), group.bytes_sent
    last = step + 1 >= worker.config.training.steps

    if traces is None:
        with watch("trace"):  # (i) forward and (ii) backward of the LM on the edits
            worker.note(f"tracing step {step}")
            traces = worker.trace(batch.edits)
    with watch("send"), worker.together(f"sending the traces of step {step}"):
        group.put_traces(step, worker.world_rank, traces)  # this rank holds them no longer

    # (iii) hyper-network, S*
    with watch("solve"), naming_records(step, batch), worker.together(f"waiting for the shifts of step {step}"):
        shifts, _ = group.solve(step, worker.shift_dtype)

    with watch("meta_loss"):  # (iv) forward and backward of the edited LM: the meta loss and ∇_W̃ of it
        worker.note(f"back-propagating the meta loss of step {step}")
        losses, shift_grads = worker.meta_backward(step, batch, shifts)
    with watch("send"), worker.together(f"sending the shift gradients of step {step}"):
        group.put_grads(step, shift_grads)

    coef, meta_loss = worker.locality_coef, worker.meta_loss(losses)
    worker.adjust_locality_coef(losses, batch)
    bytes_moved = sum(worker.gather(group.bytes_sent - sent_before))
    cache_mb = round(sum(cache.used_bytes for cache in set(worker.caches.values())) / 2**20, 1)
    report = LMReport(step + 1, *losses, meta_loss, coef, dict(watch.seconds), bytes_moved, cache_mb)
    keep(report)
    pending = group.start_backward(step) if worker.world_rank == 0 else []  # (v)–(vii) pullback, proxy loss, Adam
    ahead = None
    if overlap and not last:
        with watch("trace"):
            worker.note(f"tracing step {step + 1} ahead")
            ahead = worker.trace(worker.sampler.batch(step + 1).edits)
    with watch("wait"), naming_records(step, batch), worker.together(f"waiting for the end of step {step}"):
        actors = group.finish(pending)
    wall = time.perf_counter() - begin
    return StepDone.join(report, actors, watch.seconds, wall) if actors else None, ahead
