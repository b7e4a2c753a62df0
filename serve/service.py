"""The editing service: all of its logic, without a server.

Facts form a set. A change is planned against the facts that hold now, the new facts are traced on the unedited model,
the normal equations are added and subtracted, one solve gives the new version, guards look at it, and only then is it
recorded and made live. What is refused changes nothing.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from malmen.data.records import Fact
from malmen.edit_set import EditSet, FactRows
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.serve.candidate import Candidate
from malmen.serve.changes import LiveFacts, Plan, fact_report, make_plan
from malmen.serve.fact_rows import (
    join_rows,
    num_sent,
    plan_rows,
    store_rows,
    stored_rows,
    too_large,
    trace_rows,
    within_memory,
)
from malmen.serve.guards import Guards, Measured
from malmen.serve.http.problems import Problem
from malmen.serve.ledger.blobs import BlobStore, as_stored
from malmen.serve.ledger.chain import canonical, digest
from malmen.serve.ledger.ledger import AcceptedRequest, Ledger, NewEdit, Publication
from malmen.serve.ledger.tables import LIVE
from malmen.serve.ledger.view import Alias
from malmen.serve.messages import Change, Outcome

log = logging.getLogger(__name__)
_TRIES = 5  # a batch is computed again this often when `live` is moved meanwhile


class EditService:
    """The one writer."""

    def __init__(self, lm: LanguageModel, editor: Editor, ledger: Ledger, blobs: BlobStore, guards: Guards) -> None:
        self.lm, self.editor, self.ledger, self.blobs, self.guards = lm, editor.to(lm.device), ledger, blobs, guards
        self.encoder = fact_encoder(lm, editor.config.data)
        self.epoch = ledger.take_over()
        self.turn = threading.RLock()  # the model takes one at a time
        self._at: Alias | None = None
        self.live, self.edit_set = LiveFacts(), EditSet(self.editor)
        self._number = 0
        with self.turn:
            self._catch_up()

    def apply(self, changes: Sequence[Change]) -> list[Outcome]:
        """Answer these requests with as few solves as their contents allow; each is done wholly or not at all."""
        outcomes: dict[int, Outcome] = {}
        waiting = dict(enumerate(changes))
        with self.turn:
            for _ in range(len(changes) + _TRIES):
                if waiting:
                    waiting = self._round(waiting, outcomes)
        for index in waiting:
            outcomes[index] = Problem(503, "`live` is moved again and again; ask again", retry_after=1)
        return [outcomes[index] for index in range(len(changes))]

    def check(self, change: Change) -> None:
        """A Problem if the change could not even be begun now."""
        with self.turn:
            self._catch_up()
            make_plan(change, self.live, self._version, self.encoder)

    def prepare(self, facts: Sequence[Fact], on_facts: Callable[[int], None], at_once: int = 64) -> FactRows:
        """The rows of many facts, some at a time, so that others get their turn in between."""
        encoded = [self.encoder.encode(fact) for fact in facts]
        parts = []
        for first in range(0, len(encoded), at_once):
            with self.turn:
                parts.append(trace_rows(self.lm, self.editor, encoded[first : first + at_once], len(facts)))
            on_facts(min(first + at_once, len(encoded)))
        return FactRows.joined(parts)

    def shifts(self) -> dict[str, Tensor]:
        """What is live now, in float64."""
        with self.turn:
            self._catch_up()
            return self.edit_set.shifts()

    # --- one round: changes that do not meet ---------------------------------------------------------------

    def _round(self, waiting: dict[int, Change], outcomes: dict[int, Outcome]) -> dict[int, Change]:
        """Do as many as can be done in one solve; gives back the others."""
        plans: dict[int, Plan] = {}
        later: dict[int, Change] = {}
        touched: set[str] = set()
        try:
            self._catch_up()
            for index, change in waiting.items():
                done = self._replayed(change)
                if done is not None:
                    outcomes[index] = done
                    continue
                try:
                    plan = make_plan(change, self.live, self._version, self.encoder)
                except Problem as problem:
                    outcomes[index] = problem
                    continue
                if plans and (change.dry_run or change.base_version or touched & plan.touches()):
                    later[index] = change
                    continue
                plans[index] = plan
                touched |= plan.touches()
                if change.dry_run:  # by itself: nothing of it will be there for the others
                    later.update({other: it for other, it in waiting.items() if other > index})
                    break
            return {**self._do(plans, outcomes), **later}
        except (EditError, OSError) as error:  # a database or store that fails, rows that are gone or were changed
            said = error.strerror if isinstance(error, OSError) else error
            told = error if isinstance(error, Problem) else Problem(503, f"the store fails: {said}", retry_after=5)
            outcomes.update({index: told for index in waiting if index not in outcomes})
        self._at = None  # whatever was recorded, the next round reads the ledger
        return {}

    def _do(self, plans: dict[int, Plan], outcomes: dict[int, Outcome]) -> dict[int, Change]:
        """Publish these together; gives back those that must be planned again."""
        idle = {index: plan for index, plan in plans.items() if not plan.new and not plan.ended}
        for index, plan in idle.items():
            outcomes[index] = self._unchanged(plan)
        busy = {index: plan for index, plan in plans.items() if index not in idle}
        rows = self._trace(busy, outcomes)
        left = {index: plan for index, plan in busy.items() if index not in outcomes}
        return self._publish(left, rows, outcomes) if left else {}

    def _publish(
        self, plans: dict[int, Plan], rows: FactRows | None, outcomes: dict[int, Outcome]
    ) -> dict[int, Change]:
        """Solve, look, record. A batch that is refused is cut in two, so that nobody is refused for another's facts."""
        try:
            sent = num_sent([plan.change for plan in plans.values()])
            candidate = within_memory(too_large(sent), self._solve, list(plans.values()), rows)
        except Problem as problem:
            if len(plans) > 1:
                return self._publish_halves(plans, rows, outcomes)
            outcomes[next(iter(plans))] = problem
            return {}
        refusals = candidate.refusals(self.guards)
        if any(refusals):
            if len(plans) == 1:
                outcomes[next(iter(plans))] = candidate.refused(refusals[0])
                return {}
            return self._publish_halves(plans, rows, outcomes)
        if next(iter(plans.values())).change.dry_run:
            outcomes[next(iter(plans))] = candidate.reply(0, self._version, None)
            return {}
        try:
            replies = self._record(candidate)
        except Problem as problem:
            if problem.status != 409:
                raise
            log.info("live was moved while a version was computed: once more")
            self._at = None
            return {index: plan.change for index, plan in plans.items()}
        outcomes.update(zip(plans, replies, strict=True))
        return {}

    def _publish_halves(
        self, plans: dict[int, Plan], rows: FactRows | None, outcomes: dict[int, Outcome]
    ) -> dict[int, Change]:
        items = list(plans.items())
        half = len(items) // 2
        again: dict[int, Change] = {}
        first = sum(len(plan.new) for _, plan in items[:half])
        total = sum(len(plan.new) for _, plan in items)
        for some, bounds in ((items[:half], range(first)), (items[half:], range(first, total))):
            part = rows.select(list(bounds)) if rows is not None and len(bounds) else None
            if again:  # live was moved: the other half too must be planned again
                again.update({index: plan.change for index, plan in some})
            else:
                again.update(self._publish(dict(some), part, outcomes))
        return again

    def _trace(self, plans: dict[int, Plan], outcomes: dict[int, Outcome]) -> FactRows | None:
        """The rows of all new facts, in order; a request that is too large is told so, and left out."""
        parts = []
        for index, plan in plans.items():
            try:
                parts += [plan_rows(self.lm, self.editor, plan)] if plan.new else []
            except Problem as problem:
                outcomes[index] = problem
        return join_rows(parts)

    def _solve(self, plans: Sequence[Plan], rows: FactRows | None) -> Candidate:
        ended = [name for plan in plans for name in plan.ended]
        changed = self.edit_set.changed([rows.to(self.lm.device)] if rows else [], self._stored_rows(ended))
        try:
            shifts = changed.shifts()
        except EditError as error:
            raise Problem(422, f"these facts cannot be merged: {error}") from error
        measured = self.guards.measure(shifts, [new.encoded for plan in plans for new in plan.new])
        return Candidate(plans, changed, rows, shifts, measured)

    # --- recording ---------------------------------------------------------------------------------------

    def _record(self, candidate: Candidate) -> list[dict[str, Any]]:
        assert self._at is not None
        kept = as_stored(candidate.shifts, self.lm.dtype)
        shifts = self.blobs.put(kept) if kept else None
        places = iter(store_rows(self.blobs, candidate.rows) if candidate.rows else ())
        number = self._number + 1
        added = [
            tuple(
                NewEdit(
                    "e" + uuid.uuid4().hex[:20], new.fact.prompt, new.fact.answer, *next(places),
                    fact_report(new, found),
                )
                for new, found in zip(plan.new, predicted, strict=True)
            )
            for plan, predicted in zip(candidate.plans, candidate.predicted(), strict=True)
        ]  # fmt: skip
        ended = [tuple(plan.ended.items()) for plan in candidate.plans]
        names = [[new.id for new in some] for some in added]
        version = "v" + digest(canonical([self._version, number, shifts, names, ended]))[:16]
        replies = [
            candidate.reply(index, self._version, (version, number, names[index]))
            for index in range(len(candidate.plans))
        ]
        requests = tuple(
            AcceptedRequest(
                plan.change.actor, added[index], ended[index], replies[index], plan.change.key,
                plan.change.fingerprint(), plan.change.job,
            )
            for index, plan in enumerate(candidate.plans)
        )  # fmt: skip
        self.ledger.publish(
            Publication(
                version, number, self._version, self._at.revision, shifts, candidate.edit_set.num_facts,
                candidate.measured.report(), requests,
            ),
            self.epoch,
        )  # fmt: skip
        fresh = self.ledger.edits_by_id([name for some in names for name in some])
        self.edit_set, self._number = candidate.edit_set, number
        self.live.discard(name for some in ended for name, _ in some)
        self.live.add(fresh)
        self._at = replace(self._at, version=version, revision=self._at.revision + 1)
        return replies

    def _unchanged(self, plan: Plan) -> dict[str, Any]:
        """Everything that is asked holds already."""
        candidate = Candidate([plan], self.edit_set, None, {}, Measured(True, 0.0, None, []))
        there = self.ledger.resolve(LIVE)
        made: tuple[str, int, list[str]] | None = None if plan.change.dry_run else (there.id, there.number, [])
        reply = {**candidate.reply(0, there.parent, made), "guard": there.report}
        if not plan.change.dry_run:
            self.ledger.remember(plan.change.actor, plan.change.key, plan.change.fingerprint(), reply)
        return reply

    def _replayed(self, change: Change) -> Outcome | None:
        known = self.ledger.replay(change.actor, change.key) if change.key else None
        if known is None:
            return None
        request, reply = known
        if request != change.fingerprint():
            return Problem(422, f"the Idempotency-Key {change.key!r} was used for another request")
        return {**reply, "replayed": True}

    # --- where the ledger is -------------------------------------------------------------------------------

    @property
    def _version(self) -> str:
        assert self._at is not None
        return self._at.version

    def _catch_up(self) -> None:
        """Hold what is live in the ledger: at the start, after a roll-back, and after a failure."""
        there = self.ledger.alias(LIVE)
        assert there is not None
        if self._at and (self._at.version, self._at.revision) == (there.version, there.revision):
            return
        wanted = self.ledger.members(there.version)
        here = self.live.by_id.keys()
        gone, missing = sorted(here - wanted), self.ledger.edits_by_id(sorted(wanted - here))
        if gone or missing:
            log.info("catching up with version %s: %d facts more, %d less", there.version, len(missing), len(gone))
        full = Problem(503, f"the writer's memory does not hold the rows of version {there.version}", retry_after=5)
        more = stored_rows(self.blobs, missing, self.lm.device)
        self.edit_set = within_memory(full, self.edit_set.changed, more, self._stored_rows(gone))
        self.live.discard(gone)
        self.live.add(missing)
        self._at, self._number = there, self.ledger.last_number()

    def _stored_rows(self, names: Sequence[str]) -> Iterator[FactRows]:
        return stored_rows(self.blobs, [self.live.by_id[name] for name in names], self.lm.device)
