from __future__ import annotations

from malmen.data.records import compatible_records, unrelated_to_all
from malmen.data.world import world_records


def test_unrelated_tuples_that_another_record_edits_are_left_out() -> None:
    records = world_records("validation")[:200]
    edited = {fact.prompt for record in records for fact in (record.edit, *record.equivalents)}
    assert any(fact.prompt in edited for record in records for fact in record.unrelated)
    assert not any(fact.prompt in edited for facts in unrelated_to_all(records) for fact in facts)


def test_records_that_edit_the_same_prompt_do_not_meet() -> None:
    records = world_records("validation")[:5]
    assert compatible_records(records * 2, 8) == records
