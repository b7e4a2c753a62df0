"""Problems: they travel between processes, and become documents."""

from __future__ import annotations

import pickle

import pytest

from malmen.errors import EditError
from malmen.serve.problems import TITLES, Conflict, Problem


@pytest.mark.parametrize("kind", [Problem, Conflict])
def test_a_problem_keeps_its_type_and_members_on_its_way_between_processes(kind: type[Problem]) -> None:
    problem = pickle.loads(pickle.dumps(kind(503, "lost", retry_after=2, facts=[1])))
    assert type(problem) is kind
    assert (problem.status, problem.detail, problem.retry_after, problem.more) == (503, "lost", 2, {"facts": [1]})


def test_the_document_has_the_standard_members_and_only_those_that_are_given() -> None:
    document = Problem(409, "moved", live="v1").document()
    assert document == {"type": "about:blank", "title": TITLES[409], "status": 409, "detail": "moved", "live": "v1"}
    more = Problem(429, "wait", retry_after=7).document("/v1/edits")
    assert (more["instance"], more["retry_after"]) == ("/v1/edits", 7)


def test_an_error_that_is_a_problem_already_keeps_its_status() -> None:
    conflict = Conflict(409, "moved")
    assert Problem.of(conflict, 503) is conflict
    assert Problem.of(EditError("no rows"), 503).document() == Problem(503, "no rows").document()
