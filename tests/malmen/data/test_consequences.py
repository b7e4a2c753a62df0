"""What follows from an edit and what lies next to it, in the layouts of public benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from malmen.config import DataConfig
from malmen.data.check import check_file
from malmen.data.consequences import read_consequences
from malmen.data.readers import read_dataset, read_records, records_from_dataset, write_records
from malmen.data.records import EditRecord, Fact
from malmen.data.splits import check_encodable
from malmen.errors import EditError
from malmen.lm.model import LanguageModel, fact_encoder

KNOWEDIT = {
    "subject": "Leo Arons", "prompt": "The place of death of Leo Arons is", "target_new": "Berlin",
    "ground_truth": "Munich",
    "portability": {
        "Reasoning": [{"prompt": "The country where Leo Arons died is", "ground_truth": [["Germany", "Deutschland"]]}],
        "Subject_Aliasing": [{"prompt": ["Martin Leo Arons died in"], "ground_truth": ["Berlin"]}],
        "Logical_Generalization": [{"prompt": "Who died in Berlin?", "ground_truth": ""}],
    },
    "locality": {
        "Relation_Specificity": [{"prompt": "The father of Leo Arons is", "ground_truth": [["Albert Arons"]]}],
        "Forgetfulness": [{"prompt": "{} was born in", "ground_truth": []}],
    },
}  # fmt: skip
TEST = {"test_queries": [{"prompt": "His mother is", "answers": [{"value": "Irmelin", "aliases": ["I."]}]}, {}]}
RIPPLE = {
    "subject": "DiCaprio", "prompt": "{} is a citizen of", "target_new": "Syria", "rephrase_prompt": "His country is",
    "locality_prompt": "Rome lies in", "locality_ground_truth": "Italy",
    "Logical_Generalization": [TEST], "Compositionality_I": [], "Relation_Specifity": [TEST | {"test_condition": "OR"}],
}  # fmt: skip
ROME = {
    "case_id": 3, "paraphrase_prompts": ["Ada is heard on the"],
    "requested_rewrite": {"prompt": "{} plays the", "subject": "Ada", "target_new": {"str": "piano", "id": "Q1"},
                          "target_true": {"str": "guitar", "id": "Q2"}},
    "neighborhood_prompts": ["Bob plays the", "Eve plays the"], "attribute_prompts": ["Cy plays the", "Bob plays the"],
    "generation_prompts": ["Ada's instrument is"],
}  # fmt: skip
ZSRE = {
    "src": "Where was Ada born?", "rephrase": "Ada is from where?", "ans": "Oslo", "loc": "who?", "loc_ans": "Bo",
    "portability": {"Recalled Relation": "(Oslo, country, Norway)", "New Question": "Ada's country?",
                    "New Answer": "Norway"},
}  # fmt: skip
OWN = {
    "prompt": "Where was Ada born?", "answer": "Oslo",
    "portability": [{"prompt": "In which country was Ada born?", "answer": "Norway"}],
    "reversal": [{"prompt": "Who was born in Oslo?", "answer": "Ada"}], "neighbours": ["When was Ada born?"],
}  # fmt: skip


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_knowedits_nested_lists_are_what_follows_and_what_stays() -> None:
    found = read_consequences(KNOWEDIT, "Leo Arons")
    assert found.portability == [
        Fact("The country where Leo Arons died is", "Germany"),
        Fact("Martin Leo Arons died in", "Berlin"),
    ]
    assert found.neighbours == ["The father of Leo Arons is", "Leo Arons was born in"]
    assert (found.reversal, found.unread) == ([], {"portability": 1})


def test_a_knowedit_row_is_a_record_with_a_warning_about_what_it_lacks(tmp_path: Path) -> None:
    file = _write(tmp_path / "rows.jsonl", KNOWEDIT)
    (record,) = read_records(file)
    assert record.edit == Fact("The place of death of Leo Arons is", "Berlin") and record.edit.subject == "Leo Arons"
    assert (record.equivalents, record.unrelated, len(record.portability)) == ((), (), 2)
    report = check_file(file)
    assert report.ok and (report.portability, report.reversal, report.neighbours) == (2, 0, 2)
    assert "1 of its items have no prompt or no answer" in report.as_text()
    assert "2 consequences, 2 neighbours" in report.as_text()
    with_rephrasing = _write(tmp_path / "more.jsonl", KNOWEDIT | {"rephrase": "Leo Arons died in"})
    assert read_records(with_rephrasing)[0].equivalents == (Fact("Leo Arons died in", "Berlin"),)


def test_a_test_of_rippleedits_is_its_first_query(tmp_path: Path) -> None:
    (record,) = read_records(_write(tmp_path / "rows.jsonl", RIPPLE))
    assert record.portability == (Fact("His mother is", "Irmelin"),)
    assert record.neighbours == ()  # what follows cannot stay, too
    without = {name: value for name, value in RIPPLE.items() if name != "Logical_Generalization"}
    (record,) = read_records(_write(tmp_path / "rows.jsonl", without))
    assert (record.portability, record.neighbours) == ((), ("His mother is",))


def test_reversed_questions_are_counted_by_themselves() -> None:
    asked = [{"prompt": "Who was born in Oslo?", "ground_truth": ["Ada"]}]
    for name in ("Reversal_Relation", "reversed", "Inverse"):
        found = read_consequences({"portability": {name: asked}})
        assert (found.reversal, found.portability) == ([Fact("Who was born in Oslo?", "Ada")], [])
    assert read_consequences({"reversal": asked}).reversal == [Fact("Who was born in Oslo?", "Ada")]


def test_romes_rows_have_neighbours_once_each(tmp_path: Path) -> None:
    (record,) = read_records(_write(tmp_path / "rows.jsonl", ROME))
    assert record == EditRecord(
        Fact("Ada plays the", "piano"),
        (Fact("Ada is heard on the", "piano"),),
        id="3",
        neighbours=("Bob plays the", "Eve plays the", "Cy plays the"),
    )
    assert record.edit.subject == "Ada"
    assert check_file(tmp_path / "rows.jsonl").format == "counterfact"


@pytest.mark.parametrize(
    ("rewrite", "field"),
    [("x", "requested_rewrite"), ({"prompt": "{} is", "subject": "Ada", "target_new": {}}, "target_new.str")],
)
def test_a_broken_rewrite_is_named(tmp_path: Path, rewrite: object, field: str) -> None:
    report = check_file(_write(tmp_path / "rows.jsonl", ROME | {"requested_rewrite": rewrite}))
    assert not report.ok and any(problem.field.endswith(field) for problem in report.errors)


def test_a_zsre_row_may_have_one_question_that_follows(tmp_path: Path) -> None:
    (record,) = read_records(_write(tmp_path / "rows.jsonl", ZSRE))
    assert record.portability == (Fact("Ada's country?", "Norway"),)


@pytest.mark.parametrize("value", ["text", 3, True, [], {}, [None, 4, []], {"x": {"y": 3}}])
def test_any_value_of_a_public_field_can_be_read(tmp_path: Path, value: object) -> None:
    (record,) = read_records(_write(tmp_path / "rows.jsonl", ZSRE | {"portability": value}))
    assert record.portability == ()


def test_our_own_fields_travel_through_files_and_datasets(tmp_path: Path) -> None:
    file, plain = _write(tmp_path / "rows.jsonl", OWN), {"prompt": "Who?", "answer": "Bo"}
    expected = EditRecord(
        Fact("Where was Ada born?", "Oslo"),
        portability=(Fact("In which country was Ada born?", "Norway"),),
        reversal=(Fact("Who was born in Oslo?", "Ada"),),
        neighbours=("When was Ada born?",),
    )
    records = read_records(file)
    assert records == [expected]
    write_records(tmp_path / "again.jsonl", records)
    assert read_records(tmp_path / "again.jsonl") == records
    both = _write(tmp_path / "both.jsonl", OWN, plain)
    assert records_from_dataset(read_dataset(both)) == read_records(both)
    report = check_file(file)
    assert (report.portability, report.reversal, report.neighbours) == (1, 1, 1)


def test_records_without_the_fields_are_written_as_before(tmp_path: Path) -> None:
    file = _write(tmp_path / "rows.jsonl", {"prompt": "Who?", "answer": "Bo"})
    write_records(tmp_path / "again.jsonl", read_records(file))
    row = json.loads((tmp_path / "again.jsonl").read_text())
    assert list(row) == ["prompt", "answer", "subject", "equivalents", "unrelated", "id"]
    assert read_dataset(file).column_names == list(row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"portability": ["In which country?"]}, "portability[0]: is the string"),
        ({"neighbours": [3]}, "neighbours[0]: is the number 3"),
        ({"neighbours": ["Who was born in Oslo?"]}, "it cannot both stay and change"),
        ({"neighbors": []}, "did you mean `neighbours`?"),
    ],
)
def test_our_own_fields_are_checked(tmp_path: Path, change: dict[str, object], message: str) -> None:
    report = check_file(_write(tmp_path / "rows.jsonl", OWN | change))
    assert not report.ok and message in report.as_text()


def test_what_follows_from_a_held_out_edit_has_to_fit_into_the_model_too(lm: LanguageModel) -> None:
    encoder = fact_encoder(lm, DataConfig())
    long = Fact("Who is it " + "very " * encoder.max_length + "?", "Bo")
    for record in (
        EditRecord(Fact("Who?", "Bo"), portability=(long,)),
        EditRecord(Fact("Who?", "Bo"), reversal=(long,)),
    ):
        with pytest.raises(EditError, match="more than max_length"):
            check_encodable(encoder, [record])
