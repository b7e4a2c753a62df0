"""The service's laws: a set of facts, in any order, exactly; nothing lost, nothing doubled, nothing half done."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest
from endpoints import LENIENT, Bench, make_bench, untrained_editor, world_facts
from full_disk import full_disk
from torch import Tensor
from torch.testing import assert_close

from malmen.data.records import Fact
from malmen.lm.generate import ask
from malmen.lm.overlay import edited
from malmen.serve.messages import Change, EditReply, Receipt, reply_or_raise
from malmen.serve.problems import Problem
from malmen.serve.settings import GuardConfig
from malmen.serve.writing.service import EditService

FACTS = world_facts(80)


def add(service: EditService, *facts: Fact, **options: object) -> EditReply:
    """The reply to one request, which is expected to be accepted."""
    (outcome,) = service.apply([Change("ann", facts, **options)])
    return reply_or_raise(outcome).reply


def refusal(service: EditService, change: Change) -> Problem:
    """The problem with one request, which is expected to be refused."""
    (outcome,) = service.apply([change])
    assert isinstance(outcome, Problem), outcome
    return outcome


def apply(service: EditService, *changes: Change) -> list[EditReply]:
    """The replies to requests that come together, all of which are expected to be accepted."""
    return [reply_or_raise(outcome).reply for outcome in service.apply(changes)]


def assert_same_shifts(
    shifts: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float, atol: float | None = None
) -> None:
    """Layer by layer; `atol` is relative to the layer's largest entry unless it is given."""
    assert shifts.keys() == expected.keys() and expected
    for name, shift in expected.items():
        assert_close(shifts[name], shift, rtol=rtol, atol=atol or rtol * float(shift.abs().max()))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


@pytest.mark.slow  # 300 changes of a model in float64
def test_300_random_changes_end_in_the_shift_from_scratch_and_what_was_removed_is_forgotten(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "float64")
    service, draw = bench.service(), random.Random(3)
    people = [fact.prompt for fact in FACTS[:40]]
    answers = sorted({fact.answer for fact in FACTS})
    held: dict[str, tuple[str, str]] = {}  # prompt -> id, answer
    done = 0
    while done < 300:
        size = min(draw.randint(1, 9), 300 - done)
        prompts = draw.sample(people, size)
        gone = [prompt for prompt in prompts if prompt in held and draw.random() < 0.6]
        facts = [Fact(prompt, draw.choice(answers)) for prompt in prompts if prompt not in gone]
        reply = add(service, *facts, remove=tuple(held.pop(prompt)[0] for prompt in gone))
        held |= {fact.prompt: (row.id, fact.answer) for fact, row in zip(facts, reply.edits, strict=True)}
        done += size
    removed = [prompt for prompt in people if prompt not in held]
    assert len(held) > 5 and len(removed) > 5
    left = [Fact(prompt, answer) for prompt, (_, answer) in held.items()]
    scratch = bench.editor.edit(bench.lm, left).shifts
    assert_same_shifts(service.edit_set.shifts(), scratch, 1e-8)
    with edited(bench.lm, scratch):
        never_added = ask(bench.lm, removed, 8)
    with edited(bench.lm, service.edit_set.shifts()):
        assert ask(bench.lm, removed, 8) == never_added
    unedited = ask(bench.lm, people, 8)
    add(service, remove=tuple(name for name, _ in held.values()))
    assert service.edit_set.shifts() == {}
    with edited(bench.lm, service.edit_set.shifts()):
        assert ask(bench.lm, people, 8) == unedited


@pytest.mark.slow
def test_of_fifty_concurrent_writers_nothing_is_lost_or_doubled_and_the_versions_form_one_chain(bench: Bench) -> None:
    service = bench.service()
    replies: dict[int, object] = {}

    def write(number: int) -> None:
        change = Change(f"writer {number}", (FACTS[number],), key=f"key {number}")
        replies[number] = service.apply([change])[0]

    threads = [threading.Thread(target=write, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(replies) == 50 and all(isinstance(outcome, Receipt) for outcome in replies.values())
    members = service.ledger.members(service.ledger.resolve("live").id)
    assert {service.live.by_id[name].prompt for name in members} == {fact.prompt for fact in FACTS[:50]}
    chain = service.ledger.versions(100)[::-1]
    assert [version.parent for version in chain] == [None, *(version.id for version in chain[:-1])]
    assert service.ledger.verify()["intact"]


def test_requests_that_come_together_share_one_version(bench: Bench) -> None:
    service = bench.service()
    ann, bob = apply(service, Change("ann", (FACTS[0],)), Change("bob", (FACTS[1], FACTS[2])))
    assert ann.version == bob.version and bob.num_facts == 3
    assert [edit.actor for edit in service.ledger.edits()] == ["bob", "bob", "ann"]


def test_of_two_that_want_the_same_base_version_only_one_gets_it(bench: Bench) -> None:
    service = bench.service()
    base = service.ledger.resolve("live").id
    first, second = service.apply(
        [Change(name, (FACTS[index],), base_version=base) for index, name in enumerate(("ann", "bob"))]
    )
    assert isinstance(first, Receipt) and isinstance(second, Problem) and second.status == 409


def test_nobody_is_told_that_a_fact_holds_which_the_same_version_takes_back(bench: Bench) -> None:
    service = bench.service()
    first = add(service, FACTS[0])
    name = first.edits[0].id
    _, bob = apply(service, Change("ann", remove=(name,)), Change("bob", (FACTS[0], FACTS[1])))
    held = service.ledger.members(bob.version)
    assert len(bob.edits) == 2 and {result.id for result in bob.edits} <= held and name not in held


def test_rows_that_were_damaged_fail_the_one_who_needs_them_and_nobody_after(bench: Bench) -> None:
    service = bench.service()
    first = add(service, FACTS[0])
    edit = service.ledger.edit(first.edits[0].id)
    service.blobs.path(edit.rows).write_bytes(b"x")
    assert refusal(service, Change("ann", remove=(edit.id,))).status == 503
    assert add(service, FACTS[1]).num_facts == 2


def test_a_new_answer_to_the_same_prompt_supersedes_the_old_one_exactly(bench: Bench) -> None:
    service = bench.service()
    first = add(service, FACTS[0], FACTS[1])
    again = add(service, Fact(FACTS[0].prompt, FACTS[2].answer))
    assert again.edits[0].supersedes == first.edits[0].id and again.num_facts == 2
    scratch = bench.editor.edit(bench.lm, [FACTS[1], Fact(FACTS[0].prompt, FACTS[2].answer)]).shifts
    assert_same_shifts(service.edit_set.shifts(), scratch, 1e-4)


def test_two_answers_to_one_prompt_that_come_together_are_done_one_after_the_other(bench: Bench) -> None:
    service = bench.service()
    one, other = Fact("Who?", "Ann"), Fact("Who?", "Bob")
    ann, bob = apply(service, Change("ann", (one,)), Change("bob", (other,)))
    assert bob.edits[0].supersedes == ann.edits[0].id
    assert [edit.answer for edit in service.live.by_id.values()] == ["Bob"]


def test_a_fact_that_holds_already_makes_no_new_version(bench: Bench) -> None:
    service = bench.service()
    first = add(service, FACTS[0])
    again = add(service, FACTS[0])
    assert again.version == first.version and again.edits[0].status == "unchanged"
    assert again.edits[0].id == first.edits[0].id


def test_the_same_key_again_gives_the_same_reply_and_does_nothing_twice(bench: Bench) -> None:
    service = bench.service()
    change = Change("ann", (FACTS[0],), key="k")
    (first,) = service.apply([change])
    assert isinstance(first, Receipt) and not first.replayed
    assert service.apply([change]) == [Receipt(first.reply, replayed=True)]
    together = service.apply([Change("ann", (FACTS[1],), key="t"), Change("ann", (FACTS[1],), key="t")])
    assert isinstance(together[0], Receipt) and together[1] == Receipt(together[0].reply, replayed=True)
    assert len(service.ledger.versions()) == 3
    again = bench.service()  # after a restart
    assert again.apply([change]) == [Receipt(first.reply, replayed=True)]
    assert refusal(again, Change("ann", (FACTS[2],), key="k")).status == 422
    add(again, FACTS[2], key="other")


def test_a_dry_run_tells_what_would_be_and_changes_nothing(bench: Bench) -> None:
    service = bench.service()
    trial, _ = apply(service, Change("ann", (FACTS[0],), dry_run=True), Change("ann", (FACTS[1],)))
    assert trial.version is None and trial.edits[0].id is None and trial.dry_run
    assert list(service.live.by_prompt) == [FACTS[1].prompt]


def test_a_change_meant_for_another_version_is_refused(bench: Bench) -> None:
    service = bench.service()
    base = service.ledger.resolve("live").id
    first = add(service, FACTS[0], base_version=base)
    problem = refusal(service, Change("ann", (FACTS[1],), base_version=base))
    assert problem.status == 409 and problem.more["live"] == first.version


def test_what_is_wrong_with_each_fact_is_told_and_nothing_is_changed(bench: Bench) -> None:
    service = bench.service()
    facts = (FACTS[0], Fact("word " * 80, "long"), FACTS[0], Fact(FACTS[0].prompt, "else"))
    problem = refusal(service, Change("ann", facts))
    assert problem.status == 422
    assert [row["index"] for row in problem.more["facts"]] == [1, 2, 3]
    assert refusal(service, Change("ann", remove=("nothing",))).status == 409
    assert refusal(service, Change("ann")).status == 422
    assert len(service.ledger.versions()) == 1


@pytest.mark.parametrize(
    ("guard", "reason"),
    [
        (GuardConfig(min_success=1, max_shift_ratio=1e9, max_perplexity_ratio=1e9), "would hold"),
        (GuardConfig(min_success=0, max_shift_ratio=1e-9, max_perplexity_ratio=1e9), "max_shift_ratio"),
        (GuardConfig(min_success=0, max_shift_ratio=1e9, max_perplexity_ratio=1e-9), "max_perplexity_ratio"),
    ],
)
def test_a_version_beyond_the_guards_is_refused_with_the_reason_and_changes_nothing(
    tmp_path: Path, guard: GuardConfig, reason: str
) -> None:
    bench = make_bench(tmp_path, guard=guard, probes=tuple(FACTS[60:64]))
    bench.editor = bench.editor if reason != "would hold" else untrained_editor(bench.lm, edit_lr=1e-9)
    service = bench.service()
    problem = refusal(service, Change("ann", (FACTS[0],)))
    assert problem.status == 422 and reason in problem.detail
    assert problem.more["facts"][0]["prompt"] == FACTS[0].prompt
    assert service.edit_set.shifts() == {} and len(service.ledger.versions()) == 1


def test_limits_on_adding_do_not_hold_up_what_only_takes_back(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, probes=tuple(FACTS[60:64]))
    made = add(bench.service(), *FACTS[:4])
    bench.guard = GuardConfig(min_success=1, max_shift_ratio=1e-9, max_perplexity_ratio=1e-9)
    service = bench.service()
    assert add(service, remove=(made.edits[0].id,)).num_facts == 3
    assert refusal(service, Change("ann", (FACTS[5],))).status == 422


def test_one_fact_of_a_large_request_is_removed_by_reading_few_of_its_rows(tmp_path: Path) -> None:
    """Only the blob that holds it exists; the others were deleted."""
    bench = make_bench(tmp_path, "float64")
    facts = [Fact(f"Who lives in house {number}?", "Bob" if number == 70 else "Ann") for number in range(150)]
    service = bench.service()
    made = add(service, *facts)
    edits = service.ledger.edits_by_id([row.id for row in made.edits])
    mine = next(edit for edit in edits if edit.prompt == facts[70].prompt)
    assert sum(edit.rows == mine.rows for edit in edits) <= 64
    for name in {edit.rows for edit in edits} - {mine.rows}:
        service.blobs.path(name).unlink()
    with_it = service.edit_set.shifts()
    assert add(service, remove=(mine.id,)).num_facts == 149
    scratch = bench.editor.edit(bench.lm, [fact for fact in facts if fact.prompt != mine.prompt]).shifts
    assert_same_shifts(service.edit_set.shifts(), scratch, 1e-8)
    for name, shift in scratch.items():  # the control: with the fact every layer is far from it
        assert float((with_it[name] - shift).abs().max()) > 1e-2 * float(shift.abs().max())


def test_nobody_is_refused_for_the_facts_of_another(tmp_path: Path) -> None:
    """Alone the second does not pass the guard; the others of its batch do, with and without it."""
    bench = make_bench(tmp_path)
    trial = bench.service()

    def hold(*facts: Fact) -> bool:
        return all(result.holds for result in add(trial, *facts, dry_run=True).edits)

    kept = next(pair for pair in combinations(FACTS[:8], 2) if hold(*pair) and hold(pair[0]))
    never = Fact("Nobody asks this", " ".join(FACTS[0].answer for _ in range(25)))
    assert not hold(never)
    bench.guard = LENIENT.model_copy(update={"min_success": 1.0})
    service = bench.service()
    outcomes = service.apply([Change("a", (kept[0],)), Change("b", (never,)), Change("c", (kept[1],))])
    assert [type(outcome) for outcome in outcomes] == [Receipt, Problem, Receipt]
    assert {edit.prompt for edit in service.live.by_id.values()} == {kept[0].prompt, kept[1].prompt}


def test_rolling_back_brings_the_old_set_and_the_next_edit_builds_on_it(bench: Bench) -> None:
    service = bench.service()
    first, second = add(service, FACTS[0]), add(service, FACTS[1])
    at = service.ledger.alias("live")
    service.ledger.set_alias("live", first.version, at.revision, "ann")
    third = add(service, FACTS[2])
    assert third.parent == first.version
    assert set(service.live.by_prompt) == {FACTS[0].prompt, FACTS[2].prompt}
    scratch = bench.editor.edit(bench.lm, [FACTS[0], FACTS[2]]).shifts
    assert_same_shifts(service.edit_set.shifts(), scratch, 1e-4)
    at = service.ledger.alias("live")
    service.ledger.set_alias("live", second.version, at.revision, "ann")  # and forward again
    assert set(service.ledger.members(service.ledger.resolve("live").id)) == {
        first.edits[0].id, second.edits[0].id
    }  # fmt: skip


def test_a_writer_that_was_succeeded_publishes_no_more(bench: Bench) -> None:
    old = bench.service()
    add(old, FACTS[0])
    new = bench.service()
    assert refusal(old, Change("ann", (FACTS[1],))).status == 503
    assert add(new, FACTS[1]).num_facts == 2


def test_a_restarted_service_goes_on_with_the_same_set(bench: Bench) -> None:
    first = bench.service()
    add(first, *FACTS[:5])
    add(first, remove=(next(iter(first.live.by_id)),))
    again = bench.service()
    assert again.live.by_id.keys() == first.live.by_id.keys()
    before = first.edit_set.shifts()
    assert_same_shifts(again.edit_set.shifts(), before, 1e-9, 1e-9)


def test_facts_that_were_traced_before_give_the_same_version(bench: Bench) -> None:
    """What a job does: rows some at a time, then one publication."""
    service = bench.service()
    progress: list[int] = []
    rows = service.prepare(FACTS[:10], progress.append, at_once=4)
    assert progress == [4, 8, 10]
    add(service, *FACTS[:10], rows=rows)
    scratch = bench.editor.edit(bench.lm, FACTS[:10]).shifts
    assert_same_shifts(service.edit_set.shifts(), scratch, 1e-4)


def test_a_full_disk_is_told_and_what_was_asked_can_be_done_later(bench: Bench) -> None:
    service = bench.service()
    add(service, FACTS[0])
    with full_disk(3000):
        problem = refusal(service, Change("ann", (FACTS[1],), key="k"))
    assert problem.status == 503
    assert list(service.live.by_prompt) == [FACTS[0].prompt]
    assert add(service, FACTS[1], key="k").num_facts == 2
    assert not [path for path in (bench.folder / "blobs").iterdir() if path.name.startswith(".")]
    assert service.ledger.verify()["intact"]


def test_a_database_that_is_gone_is_told_and_its_return_is_enough(bench: Bench) -> None:
    service = bench.service()
    add(service, FACTS[0])
    service.ledger.close()
    file, away = bench.folder / "ledger.db", bench.folder / "away.db"
    file.rename(away)
    file.mkdir()  # what cannot be opened
    problem = refusal(service, Change("ann", (FACTS[1],), key="k"))
    assert problem.status == 503
    service.ledger.close()
    file.rmdir()
    away.rename(file)
    assert add(service, FACTS[1], key="k").num_facts == 2
