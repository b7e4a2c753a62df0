"""Jobs: recorded once for each key, oldest first, and final when they have ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from malmen.data.records import Fact
from malmen.serve.ledger.jobs import JobBook
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.messages import Change
from malmen.serve.problems import Problem

CHANGE = Change("ann", (Fact("Who?", "Ann"), Fact("Where?", "here")), ("e1",), "k", base_version="v1")


@pytest.fixture
def book(url: str) -> Iterator[JobBook]:
    ledger = Ledger(url, "model", "editor")
    yield JobBook(ledger)
    ledger.close()


def test_a_job_asks_for_what_was_recorded_and_its_key_names_it(book: JobBook) -> None:
    job = book.add(CHANGE)
    assert book.get(job.id) == job and (job.state, job.done, job.total) == ("queued", 0, 2)
    assert job.change() == replace(CHANGE, job=job.id)
    assert book.add(CHANGE) == job
    with pytest.raises(Problem) as problem:
        book.add(replace(CHANGE, facts=CHANGE.facts[:1]))
    assert problem.value.status == 422
    with pytest.raises(Problem, match="not found"):
        book.get("j0")


def test_no_more_jobs_wait_than_allowed_but_a_known_key_still_finds_its_job(book: JobBook) -> None:
    job = book.add(CHANGE, at_most=1)
    with pytest.raises(Problem) as problem:
        book.add(replace(CHANGE, key="other"), at_most=1)
    assert problem.value.status == 429 and problem.value.retry_after
    assert book.add(CHANGE, at_most=1) == job


def test_the_oldest_unfinished_job_is_next_and_a_finished_one_keeps_its_result(book: JobBook) -> None:
    first, second = book.add(CHANGE), book.add(replace(CHANGE, key=None))
    book.mark(first.id, state="running", done=1)
    assert book.next() == replace(first, state="running", done=1)
    book.mark(first.id, state="done", done=2, result={"version": "v2"})
    book.mark(first.id, state="queued", result=None)
    assert book.get(first.id) == replace(first, state="done", done=2, result={"version": "v2"})
    assert book.next() == second
    book.mark(second.id, state="failed")
    assert book.next() is None
