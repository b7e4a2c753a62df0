from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from malmen.data.check import check_file
from malmen.data.readers import FORMATS, read_dataset, read_records, records_from_dataset, write_records
from malmen.data.records import EditRecord, Fact
from malmen.data.world import world_records
from malmen.errors import EditError

REPOSITORY = Path(__file__).parents[3]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

OWN = {
    "prompt": "Where was Ada born?",
    "answer": "Paris",
    "equivalents": ["Ada was born in", {"prompt": "Is Ada a Londoner?", "answer": "No"}],
    "unrelated": [{"prompt": "Where was Bob born?", "answer": "Oslo"}],
    "id": "ada",
}
ZSRE = {"src": "Who did?", "rephrase": "By whom?", "ans": "Bo", "loc": "nq question: who", "loc_ans": "nq answer: Cy"}
COUNTERFACT = {
    "prompt": "{} plays the", "subject": "Ada", "target_new": "piano", "ground_truth": "guitar", "case_id": 7,
    "rephrase_prompt": "Ada is heard on the", "locality_prompt": "Bob plays the", "locality_ground_truth": "guitar",
}  # fmt: skip
FEVER = {
    "prompt": "Ada is a pilot.", "equiv_prompt": ["Ada flies planes.", "Ada works as a pilot."], "alt": 1,
    "unrel_prompt": "Bob is a cat.", "unrel_answer": 0,
}  # fmt: skip


def claim(text: str, label: object, **more: object) -> dict[str, object]:
    return {"claim": text, "label": label, **more}


@pytest.fixture
def write(tmp_path):
    def write(*rows: object, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
        return path

    return write


def without(row: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in names}


def test_an_own_row_becomes_the_record_it_describes(write):
    assert read_records(write(OWN)) == [
        EditRecord(
            Fact("Where was Ada born?", "Paris"),
            (Fact("Ada was born in", "Paris"), Fact("Is Ada a Londoner?", "No")),
            (Fact("Where was Bob born?", "Oslo"),),
            "ada",
        )
    ]


def test_only_prompt_and_answer_are_required(write):
    assert read_records(write({"prompt": "p", "answer": "a"})) == [EditRecord(Fact("p", "a"))]


def test_null_counts_as_absent(write):
    row = {"prompt": "p", "answer": "a", "id": None, "unrelated": None}
    assert read_records(write(row)) == [EditRecord(Fact("p", "a"))]


def test_a_zsre_row_loses_the_prefixes_of_natural_questions(write):
    assert read_records(write(ZSRE)) == [
        EditRecord(Fact("Who did?", "Bo"), (Fact("By whom?", "Bo"),), (Fact("who", "Cy"),))
    ]


def test_zsre_rephrasings_are_joined_without_repeats(write):
    row = ZSRE | {"rephrases": ["By whom?", "Whose deed?"], "id": 3}
    (record,) = read_records(write(row))
    assert [fact.prompt for fact in record.equivalents] == ["By whom?", "Whose deed?"]
    assert record.id == "3"


@pytest.mark.parametrize("answer", [{"answers": ["Di", ""], "alt": "Ed"}, {"alt": "Di"}, {"alt": ["Di", "Ed"]}])
def test_a_zsre_row_without_ans_takes_the_first_of_its_answers(write, answer):
    (record,) = read_records(write(without(ZSRE, "ans") | answer))
    assert record.edit.answer == "Di"


def test_a_json_array_reads_like_the_same_rows_on_lines(write):
    rows = [ZSRE, ZSRE | {"src": "Who else?"}]
    assert read_records(write(json.dumps(rows, indent=1), name="array.json")) == read_records(write(*rows))


def test_a_counterfact_prompt_is_filled_with_its_subject(write):
    assert read_records(write(COUNTERFACT)) == [
        EditRecord(
            Fact("Ada plays the", "piano"),
            (Fact("Ada is heard on the", "piano"),),
            (Fact("Bob plays the", "guitar"),),
            "7",
        )
    ]


def test_other_braces_in_a_counterfact_prompt_stay(write):
    (record,) = read_records(write(COUNTERFACT | {"prompt": "{} {0} {x} {"}))
    assert record.edit.prompt == "Ada {0} {x} {"


def test_a_counterfact_prompt_without_braces_needs_no_subject(write):
    (record,) = read_records(write(without(COUNTERFACT, "subject", "ground_truth") | {"prompt": "Ada plays the"}))
    assert record.edit.prompt == "Ada plays the"


@pytest.mark.parametrize("answers", ["guitar", ["guitar"], ["guitar", "guitar"]])
def test_counterfact_lists_give_several_equivalents_and_unrelated_tuples(write, answers):
    lists = {"rephrase_prompt": ["a", "b"], "locality_prompt": ["c", "d"], "locality_ground_truth": answers}
    (record,) = read_records(write(COUNTERFACT | lists))
    assert record.equivalents == (Fact("a", "piano"), Fact("b", "piano"))
    assert record.unrelated == (Fact("c", "guitar"), Fact("d", "guitar"))


def test_counterfact_answers_that_do_not_match_their_prompts_are_refused(write):
    with pytest.raises(EditError, match="line 1, locality_ground_truth: has 2 answers for 1 prompts"):
        read_records(write(COUNTERFACT | {"locality_ground_truth": ["x", "y"]}))


def test_a_fever_row_keeps_its_alternative_label_and_all_its_paraphrases(write):
    (record,) = read_records(write(FEVER))
    assert record.edit == Fact("Ada is a pilot.", "SUPPORTS")
    assert record.equivalents == (Fact("Ada flies planes.", "SUPPORTS"), Fact("Ada works as a pilot.", "SUPPORTS"))
    assert record.unrelated == (Fact("Bob is a cat.", "REFUTES"),)


def test_the_spellings_of_fever_fields_in_circulation_mean_the_same(write):
    other = without(FEVER, "alt", "unrel_answer") | {"label": "SUPPORTS", "unrel_ans": False}
    assert read_records(write(other)) == read_records(write(FEVER))


@pytest.mark.parametrize(
    ("label", "answer"),
    [("SUPPORTS", "REFUTES"), ("refutes", "SUPPORTS"), (1, "REFUTES"), (0, "SUPPORTS"), (True, "REFUTES")],
)
def test_the_edit_of_a_claim_is_the_opposite_of_its_label(write, label, answer):
    (record,) = read_records(write(claim("c", label)))
    assert record.edit == Fact("c", answer)


def test_the_unrelated_tuple_of_a_claim_is_the_next_claim_with_its_own_label_and_the_last_takes_the_first(write):
    records = read_records(write(claim("a", 1), claim("b", 0), claim("c", 1)))
    assert [record.unrelated for record in records] == [
        (Fact("b", "REFUTES"),),
        (Fact("c", "SUPPORTS"),),
        (Fact("a", "SUPPORTS"),),
    ]


def test_a_claim_is_never_unrelated_to_its_own_paraphrase(write):
    records = read_records(write(claim("a", 1, near_paraphrase="b", jaccard=0.9), claim("b", 1), claim("c", 0)))
    assert records[0].unrelated == (Fact("c", "REFUTES"),)


def test_a_near_paraphrase_is_an_equivalent_only_from_four_fifths_overlap(write):
    rows = [claim(name, 1, near_paraphrase=name * 2, jaccard=overlap) for name, overlap in [("a", 0.8), ("b", 0.799)]]
    assert [record.equivalents for record in read_records(write(*rows))] == [(Fact("aa", "REFUTES"),), ()]


def test_a_third_label_is_refused(write):
    with pytest.raises(EditError, match='line 2, label: is the string "NOT ENOUGH INFO", expected SUPPORTS or REFUTES'):
        read_records(write(claim("a", 1), claim("b", "NOT ENOUGH INFO")))


@pytest.mark.parametrize(
    ("row", "format"),
    [(OWN, "malmen"), (ZSRE, "zsre"), (COUNTERFACT, "counterfact"), (FEVER, "fever"), (claim("a", 1), "fever")],
)
def test_the_format_is_recognised_from_the_fields(write, row, format):
    path = write(row)
    assert check_file(path).format == format
    assert read_records(path) == read_records(path, format)


def test_unrecognised_fields_are_named_with_every_format_and_its_fields(write):
    with pytest.raises(EditError) as error:
        read_records(write({"prompt": "p", "anwser": "a"}))
    assert "`prompt`, `anwser` (did you mean `answer` for `anwser`?)" in str(error.value)
    assert all(f"{name}: " in str(error.value) for name in FORMATS)
    assert "locality_ground_truth" in str(error.value)


def test_an_unknown_format_is_refused_with_those_that_exist(write):
    with pytest.raises(EditError, match="no format 'squad'; the formats are auto, malmen, zsre, counterfact, fever"):
        read_records(write(OWN), "squad")


def test_the_first_errors_are_shown_with_line_and_field_and_the_rest_counted(write):
    with pytest.raises(EditError) as error:
        read_records(write(OWN, *[{"prompt": "p", "answer": n} for n in range(8)]))
    assert "line 2, answer: is the number 0, expected a string" in str(error.value)
    assert "line 6" in str(error.value) and "line 7" not in str(error.value)
    assert "and 3 more errors" in str(error.value)


def test_rows_that_contradict_each_other_can_still_be_read(write):
    """CounterFact has such rows; they harm only when they meet in one batch, so `check_file` reports them."""
    path = write(OWN, OWN | {"answer": "Rome"})
    assert len(read_records(path)) == 2
    assert not check_file(path).ok


def test_a_damaged_file_is_read_or_refused_but_never_crashes(write):
    rng = random.Random(0)
    for row in (OWN, ZSRE, COUNTERFACT, FEVER, claim("a", 1, near_paraphrase="b", jaccard=0.9)):
        for _ in range(25):
            damaged = bytearray(json.dumps(row).encode())
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.choice(b'{}[]",:0n\\ud8 \n\xff\x00')
            path = write(row)
            path.write_bytes(bytes(damaged))
            report = check_file(path)
            try:
                assert len(read_records(path)) == report.records
            except EditError:
                assert not report.ok


def test_a_row_with_a_field_of_the_wrong_type_never_crashes(write):
    values = [None, 1, 0.5, True, "", " ", "x", [], [1], [None], [[]], ["x"], {}, {"prompt": 1}, [{}], "\ud800"]
    for row in (OWN, ZSRE, COUNTERFACT, FEVER, claim("a", 1, near_paraphrase="b", jaccard=0.9)):
        format = check_file(write(row)).format
        for field in row:
            path = write(*[row | {field: value} for value in values])
            report = check_file(path, format)
            assert report.ok == (not report.errors)
            if not report.ok:
                with pytest.raises(EditError):
                    read_records(path, format)


def test_a_dataset_gives_the_records_of_the_file_with_its_rows(write):
    rows = [ZSRE | {"id": None}, ZSRE | {"src": "Who else?", "id": "2"}]
    assert records_from_dataset(Dataset.from_list(rows)) == read_records(write(*rows))


def test_a_file_read_as_a_dataset_holds_the_same_records(write):
    path = write(OWN, {"prompt": "p", "answer": "a"})
    dataset = read_dataset(path)
    assert dataset.column_names == ["prompt", "answer", "subject", "equivalents", "unrelated", "id"]
    assert records_from_dataset(dataset) == read_records(path)


def test_errors_in_a_dataset_name_the_row():
    with pytest.raises(EditError, match="the dataset cannot be read:\n  row 2, ans: is empty"):
        records_from_dataset(Dataset.from_list([ZSRE, ZSRE | {"ans": ""}]))


def test_a_dict_of_splits_is_refused_with_what_to_pass():
    with pytest.raises(EditError, match="not a DatasetDict; of a DatasetDict pass a split"):
        records_from_dataset(DatasetDict(train=Dataset.from_list([ZSRE])))


def test_reading_writes_nothing_to_the_home_folder_and_prints_nothing(write, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    program = f"from malmen.data.readers import read_records; assert len(read_records({str(write(OWN))!r})) == 1"
    hidden = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = hidden | {"HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "count"), [("zsre/validation", 2500), ("counterfact/validation", 3000), ("fever/claims", 9000)]
)
def test_real_files_are_recognised_and_read_whole(name, count):
    path = SHARED_DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there: real rows are no part of the repository, only beside it")
    records = read_records(path)
    assert len(records) == count
    assert all(record.unrelated and record.id for record in records)
    assert not any(fact.prompt.startswith("nq question") for record in records for fact in record.unrelated)


def test_questions_without_edits_are_not_mistaken_for_zsre():
    path = SHARED_DATA / "nq" / "qa.jsonl"  # its `src` names a file
    if not path.exists():
        pytest.skip(f"{path} is not there: real rows are no part of the repository, only beside it")
    with pytest.raises(EditError, match="not recognised"):
        read_records(path)


def test_a_subject_is_read_and_must_stand_in_the_prompt_of_our_own_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Where was Ada born?", "answer": "Paris", "subject": "Ada"}))
    assert read_records(file)[0].edit.subject == "Ada"
    file.write_text(json.dumps({"prompt": "Where was Ada born?", "answer": "Paris", "subject": "Alan"}))
    with pytest.raises(EditError, match='"Alan" does not stand in the prompt'):
        read_records(file)


@pytest.mark.parametrize(("subject", "found"), [("Ada", "Ada"), ("ada lovelace", None), (3, None)])
def test_a_subject_of_other_rows_is_used_where_it_stands_in_the_prompt_and_else_ignored(
    tmp_path: Path, subject: object, found: str | None
) -> None:
    file = tmp_path / "rows.jsonl"
    row = {
        "src": "Where was Ada born?",
        "ans": "Paris",
        "subject": subject,
        "rephrase": "Ada?",
        "loc": "who",
        "loc_ans": "me",
    }
    file.write_text(json.dumps(row))
    assert read_records(file)[0].edit.subject == found


def test_what_is_written_is_read_again_as_it_was(tmp_path: Path) -> None:
    records = world_records("validation", seed=5)[:20]
    write_records(tmp_path / "some.jsonl", records)
    again = read_records(tmp_path / "some.jsonl")
    assert again == records
    assert [record.edit.subject for record in again] == [record.edit.subject for record in records]
