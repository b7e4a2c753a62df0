"""The editing service: all of its logic, without a server.

Facts form a set. A change is planned against the facts that hold now, the new facts are traced on the unedited model,
the normal equations are added and subtracted, and one solve gives the new version. If the guards accept it, it is
recorded and becomes live. A refused change has no effect.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from malmen.data.records import Fact
from malmen.edit_set import EditSet, FactRows
from malmen.editor import Editor
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.ledger.chain import digest
from malmen.serve.ledger.ledger import AcceptedChange, Ledger
from malmen.serve.ledger.tables import LIVE, Alias, NewEdit
from malmen.serve.messages import Change, Outcome, Receipt
from malmen.serve.problems import Conflict, Problem
from malmen.serve.writing.candidate import Candidate
from malmen.serve.writing.changes import LiveFacts, Plan, make_plan
from malmen.serve.writing.fact_rows import plan_rows, store_rows, stored_rows, too_large, trace_rows, within_memory
from malmen.serve.writing.guards import Guards

log = logging.getLogger(__name__)
_CONFLICTS = 5  # how often a batch is computed again because `live` was moved meanwhile


class EditService:
    """The one writer's service. Methods may be called from several threads."""

    def __init__(self, lm: LanguageModel, editor: Editor, ledger: Ledger, blobs: BlobStore, guards: Guards) -> None:
        self.lm, self.editor, self.ledger, self.blobs, self.guards = lm, editor.to(lm.device), ledger, blobs, guards
        self.encoder = fact_encoder(lm, editor.config.data)
        self.epoch = ledger.take_over()
        self.turn = threading.RLock()  # the model handles one request at a time
        self.live, self.edit_set = LiveFacts(), EditSet(self.editor)
        self._alias: Alias | None = None  # `live`, as `self.live` and `self.edit_set` have it; None: read the ledger
        self._number = 0  # of the newest version
        with self.turn:
            self._catch_up()

    def apply(self, changes: Sequence[Change]) -> list[Outcome]:
        """Answer each request with as few solves as their contents allow; each is carried out fully or not at all."""
        waiting, outcomes = dict(enumerate(changes)), dict[int, Outcome]()
        with self.turn:
            for _ in range(len(changes) + _CONFLICTS):
                if waiting:
                    outcomes |= self._decide(waiting)
                    waiting = {index: change for index, change in waiting.items() if index not in outcomes}
        busy = Problem(503, "`live` is moved again and again; repeat the request", retry_after=1)
        return [outcomes.get(index, busy) for index in range(len(changes))]

    def check(self, change: Change) -> None:
        """Raise a Problem if the change could not be planned now."""
        with self.turn:
            make_plan(change, self.live, self._catch_up().version, self.encoder)

    def prepare(self, facts: Sequence[Fact], on_facts: Callable[[int], None], at_once: int = 64) -> FactRows:
        """The rows of many facts; between any `at_once` of them other requests get their turn."""
        encoded = [self.encoder.encode(fact) for fact in facts]
        parts = []
        for first in range(0, len(encoded), at_once):
            with self.turn:
                parts.append(trace_rows(self.lm, self.editor, encoded[first : first + at_once], len(facts)))
            on_facts(min(first + at_once, len(encoded)))
        return FactRows.joined(parts)

    # --- deciding: each method returns the outcomes that it has; a request without one waits for the next round ---

    def _decide(self, waiting: Mapping[int, Change]) -> dict[int, Outcome]:
        """Plan as many requests as one version can hold, and publish them."""
        outcomes: dict[int, Outcome] = {}
        plans: dict[int, Plan] = {}
        touched: set[str] = set()
        try:
            alias = self._catch_up()
            for index, change in waiting.items():
                if replayed := self.ledger.replay(change):
                    outcomes[index] = replayed
                    continue
                try:
                    plan = make_plan(change, self.live, alias.version, self.encoder)
                except Problem as problem:
                    outcomes[index] = problem
                    continue
                if plans and (change.dry_run or change.base_version or touched & plan.touches()):
                    continue
                plans[index] = plan
                touched |= plan.touches()
                if change.dry_run:  # alone: nothing of it will hold for the others
                    break
            idle = {index: plan for index, plan in plans.items() if not plan.new and not plan.ended}
            outcomes |= {index: self._unchanged(plan) for index, plan in idle.items()}
            traced, refused = self._trace({index: plan for index, plan in plans.items() if index not in idle})
        except (EditError, OSError) as error:
            return self._failed(waiting, error) | outcomes
        return outcomes | refused | self._publish(traced)

    def _trace(self, plans: Mapping[int, Plan]) -> tuple[dict[int, Plan], dict[int, Outcome]]:
        """The plans with the rows of their new facts, and the refusals of those that are too large for the memory."""
        traced: dict[int, Plan] = {}
        refused: dict[int, Outcome] = {}
        for index, plan in plans.items():
            try:
                traced[index] = replace(plan, rows=plan_rows(self.lm, self.editor, plan)) if plan.new else plan
            except Problem as problem:
                refused[index] = problem
        return traced, refused

    def _publish(self, plans: Mapping[int, Plan]) -> dict[int, Outcome]:
        """Solve, measure, record. A batch that is refused is halved: no request is refused for another's facts."""
        if not plans:
            return {}
        (index, plan), *others = plans.items()
        alias = self._alias
        assert alias is not None
        try:
            try:
                size = sum(plan.change.size for plan in plans.values())
                candidate = within_memory(too_large(size), self._solve, plans)
            except Problem as problem:
                return self._publish_halves(plans) if others else {index: problem}
            refusals = candidate.refusals(self.guards)
            if refusals:
                return self._publish_halves(plans) if others else {index: candidate.refused(index, refusals[index])}
            if plan.change.dry_run:
                trial = candidate.version("a dry run", self._number, alias.version, None)
                return {index: Receipt(plan.reply(candidate.reports()[index], trial))}
            return self._record(candidate, alias)
        except Conflict:
            log.info("`live` was moved while a version was computed: computing it again")
            self._alias = None
            return {}
        except (EditError, OSError) as error:
            return self._failed(plans, error)

    def _publish_halves(self, plans: Mapping[int, Plan]) -> dict[int, Outcome]:
        requests, middle = list(plans.items()), len(plans) // 2
        outcomes = self._publish(dict(requests[:middle]))
        if self._alias is None:  # `live` was moved, or the store failed: the second half must be planned again
            return outcomes
        return outcomes | self._publish(dict(requests[middle:]))

    def _failed(self, indices: Iterable[int], error: EditError | OSError) -> dict[int, Outcome]:
        """The same refusal for all: a database or store that fails, rows that are missing or were changed."""
        self._alias = None  # whatever was recorded, the next round reads the ledger
        if not isinstance(error, Problem):
            reason = error.strerror if isinstance(error, OSError) else error
            error = Problem(503, f"the store fails: {reason}", retry_after=5)
        return dict.fromkeys(indices, error)

    def _solve(self, plans: Mapping[int, Plan]) -> Candidate:
        parts = [plan.rows for plan in plans.values() if plan.rows]
        rows = FactRows.joined(parts) if len(parts) > 1 else next(iter(parts), None)  # a single one is not copied
        ended = [name for plan in plans.values() for name in plan.ended]
        changed = self.edit_set.changed([rows.to(self.lm.device)] if rows else [], self._stored_rows(ended))
        try:
            shifts = changed.shifts()
        except EditError as error:
            raise Problem(422, f"these facts cannot be merged: {error}") from error
        measured = self.guards.measure(shifts, [new.encoded for plan in plans.values() for new in plan.new])
        return Candidate(plans, rows, changed, shifts, measured)

    # --- recording -----------------------------------------------------------------------------------------

    def _record(self, candidate: Candidate, alias: Alias) -> dict[int, Outcome]:
        plans = candidate.plans
        dtype = torch.float64 if self.lm.dtype == torch.float64 else torch.float32
        shifts = {layer: shift.to(dtype) for layer, shift in candidate.shifts.items()}
        blob = self.blobs.put(shifts) if shifts else None
        names = [[new.id for new in plan.new] for plan in plans.values()]
        ended = [tuple(plan.ended.items()) for plan in plans.values()]
        number = self._number + 1
        name = "v" + digest([alias.version, number, blob, names, ended])[:16]
        version = candidate.version(name, number, alias.version, blob)
        places = iter(store_rows(self.blobs, candidate.rows) if candidate.rows else ())
        reports = candidate.reports()
        added = [
            tuple(
                NewEdit(new.id, new.fact.prompt, new.fact.answer, *next(places), report)
                for new, report in zip(plan.new, reports[index], strict=True)
            )
            for index, plan in plans.items()
        ]
        replies = {index: plan.reply(reports[index], version) for index, plan in plans.items()}
        changes = (plan.change for plan in plans.values())
        accepted = [*map(AcceptedChange, changes, added, ended, replies.values())]
        self.ledger.publish(version, accepted, alias.revision, self.epoch)
        edits = self.ledger.edits_by_id([name for part in names for name in part])
        self.edit_set, self._number = candidate.edit_set, number
        self.live.discard(name for part in ended for name, _ in part)
        self.live.add(edits)
        self._alias = replace(alias, version=version.id, revision=alias.revision + 1)
        return {index: Receipt(reply) for index, reply in replies.items()}

    def _unchanged(self, plan: Plan) -> Receipt:
        """The reply to a change that asks only for what holds already."""
        reply = plan.reply((), self.ledger.resolve(LIVE))
        if not plan.change.dry_run:
            self.ledger.store_reply(plan.change, reply)
        return Receipt(reply)

    # --- following the ledger ------------------------------------------------------------------------------

    def _catch_up(self) -> Alias:
        """Hold the facts that are live in the ledger: at the start, after a roll-back, and after a failure."""
        alias = self.ledger.alias(LIVE)
        if self._alias and (self._alias.version, self._alias.revision) == (alias.version, alias.revision):
            return alias
        wanted, held = self.ledger.members(alias.version), self.live.by_id.keys()
        ended, missing = sorted(held - wanted), self.ledger.edits_by_id(sorted(wanted - held))
        if ended or missing:
            log.info("following version %s: %d facts to add, %d to remove", alias.version, len(missing), len(ended))
        full = Problem(503, f"the writer's memory does not hold the rows of version {alias.version}", retry_after=5)
        added = stored_rows(self.blobs, missing, self.lm.device)
        self.edit_set = within_memory(full, self.edit_set.changed, added, self._stored_rows(ended))
        self.live.discard(ended)
        self.live.add(missing)
        self._alias, self._number = alias, self.ledger.versions(1)[0].number
        return alias

    def _stored_rows(self, names: Sequence[str]) -> Iterator[FactRows]:
        return stored_rows(self.blobs, [self.live.by_id[name] for name in names], self.lm.device)
