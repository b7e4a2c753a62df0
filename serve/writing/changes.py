"""What a change does to the set of facts, given the facts that hold now."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from malmen.data.records import Fact
from malmen.data.tokens import EncodedFact, FactEncoder
from malmen.edit_set import FactRows
from malmen.errors import EditError
from malmen.serve.ledger.tables import Edit, Version
from malmen.serve.messages import Change, EditReply, FactResult, GuardReport
from malmen.serve.problems import Problem


@dataclass
class LiveFacts:
    """The edits that hold now, by id and by prompt."""

    by_id: dict[str, Edit] = field(default_factory=dict)
    by_prompt: dict[str, Edit] = field(default_factory=dict)

    def add(self, edits: Iterable[Edit]) -> None:
        """From now on these hold."""
        for edit in edits:
            self.by_id[edit.id] = edit
            self.by_prompt[edit.prompt] = edit

    def discard(self, names: Iterable[str]) -> None:
        """From now on the edits with these ids do not hold."""
        for name in names:
            edit = self.by_id.pop(name)
            if self.by_prompt.get(edit.prompt) is edit:
                del self.by_prompt[edit.prompt]


@dataclass(frozen=True)
class NewFact:
    """A fact to add."""

    id: str  # of the edit that it becomes
    index: int  # in its request
    fact: Fact
    encoded: EncodedFact
    supersedes: str | None  # the edit of the same prompt that it replaces

    def report(self, predicted: list[int]) -> dict[str, Any]:
        """Whether the fact holds, given the most probable answer tokens."""
        targets = self.encoded.targets
        right = sum(token == target for token, target in zip(predicted, targets, strict=False))
        return {"holds": predicted == targets, "tokens_right": right, "tokens": len(targets)}


@dataclass(frozen=True)
class Plan:
    """A change, resolved against the facts that hold."""

    change: Change
    new: tuple[NewFact, ...]
    unchanged: Mapping[int, Edit]  # facts that hold already, by index
    ended: Mapping[str, str]  # edit -> removed or superseded
    rows: FactRows | None = None  # of the new facts, once they are traced

    def touches(self) -> set[str]:
        """What no other change of the same batch may touch: its prompts, the edits it ends or relies on, its key."""
        key = {f"key {self.change.actor} {self.change.key}"} if self.change.key else set()
        prompts = {f"prompt {fact.prompt}" for fact in self.change.facts}
        edits = [*self.ended, *(edit.id for edit in self.unchanged.values())]
        return {*key, *prompts, *(f"edit {name}" for name in edits)}

    def reply(self, reports: Iterable[Mapping[str, Any]], version: Version) -> EditReply:
        """What the caller reads; `reports` say whether each new fact holds. A dry run gives no name to anything."""
        change = self.change
        results = [
            FactResult(index=index, id=edit.id, status="unchanged", supersedes=None, **edit.report)
            for index, edit in self.unchanged.items()
        ]
        for new, report in zip(self.new, reports, strict=True):
            name = None if change.dry_run else new.id
            results.append(FactResult(index=new.index, id=name, status="added", supersedes=new.supersedes, **report))
        return EditReply(
            version=None if change.dry_run else version.id,
            number=None if change.dry_run else version.number,
            parent=version.parent,
            dry_run=change.dry_run,
            edits=sorted(results, key=lambda result: result.index),
            removed=[name for name, how in self.ended.items() if how == "removed"],
            num_facts=version.num_facts,
            guard=GuardReport(**version.report),
        )


def make_plan(change: Change, live: LiveFacts, version: str, encoder: FactEncoder) -> Plan:
    """Resolve a change; raises a Problem that lists everything wrong with it, fact by fact."""
    if change.base_version is not None and change.base_version != version:
        detail = f"base_version is {change.base_version}, but {version} is live now; read it and repeat the request"
        raise Problem(409, detail, live=version)
    if not change.size:
        raise Problem(422, "the request is empty: give facts to add, or edits to remove")
    for name in change.remove:
        if name not in live.by_id:
            raise Problem(409, f"the edit {name!r} is not live, so it cannot be removed", edit=name)
    ended = dict.fromkeys(change.remove, "removed")
    new, unchanged, wrong = [], {}, []
    answers: dict[str, str] = {}
    for index, fact in enumerate(change.facts):
        held = live.by_prompt.get(fact.prompt)
        try:
            if fact.prompt in answers:
                other = answers[fact.prompt]
                same = "the fact is given twice"
                raise EditError(same if other == fact.answer else f"the prompt is also given {other!r}")
            answers[fact.prompt] = fact.answer
            encoded = encoder.encode(fact)
        except EditError as error:
            wrong.append({"index": index, "prompt": fact.prompt, "detail": str(error)})
            continue
        if held and held.answer == fact.answer and held.id not in ended:
            unchanged[index] = held
            continue
        if held:
            ended.setdefault(held.id, "superseded")
        new.append(NewFact("e" + uuid.uuid4().hex[:20], index, fact, encoded, held.id if held else None))
    if wrong:
        raise Problem(422, f"{len(wrong)} of {len(change.facts)} facts cannot be used", facts=wrong)
    return Plan(change, tuple(new), unchanged, ended)
