from __future__ import annotations

import pytest

from malmen.errors import EditError, check_base_model, last_line, same_base_model


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one", "one"),
        ("Traceback:\n  deep\nValueError: 3 \n\n", "ValueError: 3"),
        ("", "ValueError"),
        (" \n", "ValueError"),
    ],
)
def test_the_last_line_of_an_error_says_something(text: str, expected: str) -> None:
    assert last_line(ValueError(text)) == expected


def test_a_wrong_base_model_is_refused_with_both_fingerprints() -> None:
    check_base_model("the edit in runs/a", "aaa", "aaa")
    with pytest.raises(EditError) as refusal:
        check_base_model("the edit in runs/a", "aaa", "bbb")
    for part in ("the edit in runs/a", "belongs to base model aaa", "given is bbb"):
        assert part in str(refusal.value)


def test_fingerprints_without_tables_are_compared_by_their_weights() -> None:
    assert same_base_model("aaa", "aaa-1") and same_base_model("aaa-1", "aaa-1") and same_base_model("aaa-1", "aaa")
    assert not same_base_model("aaa-1", "aaa-2") and not same_base_model("aaa", "bbb-1")
