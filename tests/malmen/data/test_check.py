from __future__ import annotations

import json
from pathlib import Path

import pytest

from malmen.data.check import Report, check_file
from malmen.data.rows import Problem
from malmen.errors import EditError

SHARED_DATA = Path(__file__).parents[3].parent / "shared" / "data"
FULL = {
    "prompt": "Where was Ada born?",
    "answer": "Paris",
    "equivalents": ["Ada was born in"],
    "unrelated": [{"prompt": "Where was Bob born?", "answer": "Oslo"}],
}


@pytest.fixture
def check(tmp_path):
    """Write rows (bytes as they are, others as JSON) a line each and check the file."""

    def check(*rows: object, **options: object) -> Report:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
        return check_file(path, **options)

    return check


def only(report: Report) -> Problem:
    """The one problem of the report, whose remedy has to be one sentence."""
    assert len(report.problems) == 1, report.as_text()
    (problem,) = report.problems
    assert problem.remedy[0].isupper() and problem.remedy[-1] in ".?"
    return problem


def test_a_good_file_has_no_problems_and_its_parts_are_counted(check):
    report = check(FULL, FULL | {"prompt": "Where is Ada from?"})
    assert report.ok and report.problems == []
    assert (report.format, report.records, report.equivalents, report.unrelated) == ("malmen", 2, 2, 2)


# the file


def test_a_missing_file_is_reported_with_the_name_that_was_meant(tmp_path):
    (tmp_path / "edits.jsonl").write_text("{}")
    problem = only(check_file(tmp_path / "edit.jsonl"))
    assert "does not exist" in problem.message
    assert problem.remedy == "Did you mean `edits.jsonl`?"


def test_a_directory_is_reported_with_the_files_in_it(tmp_path):
    (tmp_path / "edits.jsonl").write_text("{}")
    problem = only(check_file(tmp_path))
    assert "is a directory" in problem.message
    assert "`edits.jsonl`" in problem.remedy


def test_a_path_that_the_system_refuses_is_reported(tmp_path):
    assert "cannot be read" in only(check_file(tmp_path / ("x" * 5000))).message


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xef\xbb\xbf", b"[]"])
def test_a_file_without_rows_is_reported(check, content):
    problem = only(check(content))
    assert "empty" in problem.message and problem.line == 0


def test_bytes_that_are_not_utf8_are_reported_once_with_line_and_position(check):
    latin = '{"prompt": "é", "answer": "a"}'.encode("latin-1")
    report = check(FULL, latin, latin)
    problem = only(report)
    assert (problem.line, problem.message) == (
        2,
        "byte 13 of the line, 0xe9, is not UTF-8 (the first of 2 such lines)",
    )
    assert report.records == 1


def test_bytes_that_are_not_utf8_are_found_in_an_array_too(check):
    problem = only(check(b"[", '{"prompt": "é"}]'.encode("latin-1")))
    assert (problem.line, problem.message) == (2, "byte 13 of the line, 0xe9, is not UTF-8")


def test_utf16_and_binary_files_are_one_problem(check):
    assert "UTF-16" in only(check("\n".join([json.dumps(FULL)] * 3).encode("utf-16"))).message


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_harmless(check):
    line = json.dumps(FULL).encode()
    assert check(b"\xef\xbb\xbf" + line + b"\r", b"\r", b"").problems == []


def test_a_line_separator_inside_a_string_does_not_end_the_line(check):
    row = json.dumps(FULL | {"prompt": "a\u2028b"}, ensure_ascii=False).encode()
    assert check(row).problems == []


# the rows


def test_invalid_json_is_reported_with_line_and_column_and_the_other_rows_are_checked(check):
    report = check(FULL, b'{"prompt": "p" "answer": "a"}', FULL | {"prompt": "q", "answer": 3})
    assert [(problem.line, problem.field) for problem in report.problems] == [(2, ""), (3, "answer")]
    assert report.problems[0].message == "invalid JSON at column 16: Expecting ',' delimiter"


def test_an_object_written_over_several_lines_is_one_problem(check):
    problem = only(check(json.dumps(FULL, indent=2).encode()))
    assert problem.message.startswith("the file is one JSON object written over several lines")


def test_an_unfinished_array_is_reported_where_it_breaks(check):
    problem = only(check(b"[", json.dumps(FULL).encode()))
    assert problem.line == 2 and "invalid JSON" in problem.message


@pytest.mark.parametrize(("row", "given"), [(3, "the number 3"), ("x", 'the string "x"'), (None, "null")])
def test_a_row_that_is_no_object_is_reported_as_what_it_is(check, row, given):
    problem = only(check(FULL, row))
    assert (problem.line, problem.message) == (2, f"the line is {given}, expected a JSON object")


def test_a_list_as_the_first_row_of_many_is_not_taken_for_an_array(check):
    problem = only(check([1, 2], FULL))
    assert (problem.line, problem.message) == (1, "the line is a list of 2, expected a JSON object")


def test_the_places_in_an_array_are_elements(check):
    report = check([FULL, FULL | {"answer": 5}, 7])
    assert report.unit == "element"
    assert "error: element 2, answer: is the number 5, expected a string" in report.as_text()
    assert "error: element 3: the element is the number 7, expected a JSON object" in report.as_text()


def test_fields_that_no_format_has_are_reported_and_not_raised(check):
    problem = only(check({"question": "q", "answer": "a"}))
    assert (problem.line, problem.severity) == (1, "error")
    assert "has the fields `question`, `answer`" in problem.message


def test_the_name_of_a_format_that_does_not_exist_is_the_callers_error(check):
    with pytest.raises(EditError, match="no format 'jsonl'"):
        check(FULL, format="jsonl")


# the fields


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"answer": None}, "answer", "the field is missing or null; given are `prompt`, `equivalents`, `unrelated`"),
        ({"answer": ["a"]}, "answer", "is a list of 1, expected a string"),
        ({"answer": True}, "answer", "is true, expected a string"),
        ({"answer": ""}, "answer", "is empty, expected text"),
        ({"prompt": " \t"}, "prompt", "is blank, expected text"),
        ({"prompt": "a\ud800"}, "prompt", 'is "a\\ud800", which is not Unicode text'),
        ({"id": {}}, "id", "is an empty object, expected a string"),
        ({"unrelated": "x"}, "unrelated", 'is the string "x", expected a list'),
        ({"unrelated": ["x"]}, "unrelated[0]", 'is the string "x", expected an object with `prompt` and `answer`'),
        (
            {"equivalents": ["x", 2]},
            "equivalents[1]",
            "is the number 2, expected an object with `prompt` and `answer` or a prompt",
        ),
        (
            {"equivalents": [{"answer": "x"}]},
            "equivalents[0].prompt",
            "the field is missing or null; given are `answer`",
        ),
        ({"unrelated": [{"prompt": "x", "answer": ""}]}, "unrelated[0].answer", "is empty, expected text"),
    ],
)
def test_a_faulty_field_is_named_with_what_was_given_and_expected(check, change, field, message):
    problem = only(check(FULL | change, format="malmen"))
    assert (problem.line, problem.field, problem.message, problem.severity) == (1, field, message, "error")


def test_all_faults_of_a_row_are_reported_together(check):
    report = check({"prompt": "", "answer": 1, "id": []})
    assert [problem.field for problem in report.problems] == ["prompt", "answer", "id"]


def test_an_unknown_key_is_reported_with_the_one_that_was_meant(check):
    problem = only(check(FULL | {"equivalent": []}))
    assert problem.field == "equivalent"
    assert problem.message.startswith("unknown key; did you mean `equivalents`? the known keys are `prompt`, `answer`")
    assert problem.remedy == "Rename it to `equivalents`."


def test_an_unknown_key_inside_a_tuple_is_reported_with_its_place(check):
    problem = only(check(FULL | {"unrelated": [{"prompt": "x", "answer": "y", "weight": 1}]}))
    assert (problem.field, problem.remedy) == ("unrelated[0].weight", "Remove it.")


def test_keys_that_other_formats_carry_along_are_not_reported(check):
    row = {"src": "s", "rephrase": "r", "ans": "a", "loc": "l", "loc_ans": "m", "aliases": ["a"], "pred": "x"}
    assert check(row).problems == []


def test_a_prompt_that_is_only_its_prefix_is_empty(check):
    row = {"src": "s", "rephrase": "r", "ans": "a", "loc": "nq question: ", "loc_ans": "m"}
    assert only(check(row)).field == "loc"


# the texts


def test_a_text_is_too_long_beyond_the_limit_and_not_at_it(check):
    assert check(FULL | {"prompt": "x" * 50}, max_chars=50).ok
    problem = only(check(FULL | {"prompt": "x" * 51}, max_chars=50))
    assert (problem.field, problem.severity) == ("prompt", "error")
    assert problem.message == "the prompt has 51 characters, at most 50 are allowed"


def test_a_long_answer_is_a_warning(check):
    assert check(FULL | {"answer": "x" * 400}).problems == []
    report = check(FULL | {"answer": "x" * 401})
    assert (only(report).severity, report.ok) == ("warning", True)


@pytest.mark.parametrize("answer", [" Paris", "Paris\n"])
def test_white_space_around_an_answer_is_a_warning(check, answer):
    problem = only(check(FULL | {"answer": answer}))
    assert (problem.field, problem.severity) == ("answer", "warning")


# between rows and tuples


def test_a_repeated_row_is_a_warning_that_names_the_first(check):
    report = check({**FULL, "prompt": "other"}, FULL, FULL, FULL)
    assert report.ok
    assert [(problem.line, problem.severity) for problem in report.problems] == [(3, "warning"), (4, "warning")]
    assert all("line 2" in problem.message for problem in report.problems)


def test_two_answers_to_one_prompt_are_an_error_that_names_both(check):
    report = check(FULL, FULL | {"answer": "Rome"})
    assert not report.ok
    assert only(report).message == 'the prompt "Where was Ada born?" has the answer "Rome", but "Paris" on line 1'


@pytest.mark.parametrize(("prompt", "role"), [(FULL["prompt"], "the edit"), (FULL["equivalents"][0], "an equivalent")])
def test_a_tuple_cannot_be_unrelated_to_its_own_record(check, prompt, role):
    problem = only(check(FULL | {"unrelated": [{"prompt": prompt, "answer": "Oslo"}]}))
    assert (problem.field, problem.severity) == ("unrelated", "error")
    assert f"the prompt of {role}" in problem.message


def test_the_edit_of_one_record_may_be_unrelated_to_another(check):
    assert check(FULL, FULL | {"prompt": "Where was Bob born?", "unrelated": [{"prompt": "x", "answer": "y"}]}).ok


def test_records_without_equivalents_or_unrelated_tuples_are_one_warning_for_the_file(check):
    report = check(FULL, *[{"prompt": f"p{n}", "answer": "a"} for n in range(5)])
    problem = only(report)
    assert (problem.line, problem.severity) == (0, "warning")
    assert problem.message == "of 6 records, 5 have no equivalents and 5 have no unrelated tuples"


# the report


def test_a_report_survives_json_with_all_its_parts(check):
    report = check(FULL, FULL | {"answer": "Rome"})
    content = json.loads(json.dumps(report.as_dict()))
    assert content["ok"] is False
    assert (content["format"], content["unit"], content["records"]) == ("malmen", "line", 2)
    assert content["problems"][0].keys() == {"line", "field", "message", "remedy", "severity"}


def test_a_printed_report_shows_the_first_problems_and_counts_them_all(check):
    text = check(*[{"prompt": "p", "answer": n} for n in range(30)]).as_text(limit=3)
    assert text.count("error: line") == 3
    assert "... and 27 more problems" in text
    assert text.endswith("(malmen): 0 records, 0 equivalents, 0 unrelated tuples; 30 errors, 0 warnings")


def test_errors_are_printed_before_warnings(check):
    text = check(FULL | {"answer": " Paris"}, FULL | {"answer": "Rome"}).as_text(limit=1)
    assert text.startswith("error: line 2")


def test_counterfact_contradicts_itself_and_nothing_else_is_wrong_with_it():
    path = SHARED_DATA / "counterfact" / "validation.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there: real rows are no part of the repository, only beside it")
    report = check_file(path)
    assert report.records == 3000
    assert len(report.problems) == 8
    assert all("has the answer" in problem.message for problem in report.errors)
