"""`malmen serve` on the command line: what can be wrong before anything is started."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from endpoints import make_bench, save_editor, world_facts

from malmen.serve.messages import Change

Run = Callable[..., tuple[int, str, str]]


def test_every_setting_is_listed(malmen: Run) -> None:
    code, out, _ = malmen("serve", "settings", "--json")
    keys = {row["key"] for row in json.loads(out)}
    assert code == 0 and {"editor", "store", "guard.min_success", "reader.max_replicas"} <= keys


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--editor", "nowhere"], 1, "no editor in nowhere"),
        (["--editor", "EDITOR", "gard.min_success=1"], 2, "unknown key 'gard'"),
        (["--editor", "EDITOR", "guard.min_success=7"], 2, "less than or equal to 1"),
        (["--editor", "EDITOR", "database=mysql://here"], 2, "sqlite or postgresql"),
        (["--editor", "EDITOR", "--config", "nowhere.yaml"], 2, "cannot read the settings file"),
        (["--port", "9000"], 2, "editor"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_started(
    malmen: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    editor = str(save_editor(tmp_path / "run")) if "EDITOR" in args else ""
    found, _, err = malmen("serve", *[editor if arg == "EDITOR" else arg for arg in args])
    assert found == code and said in err and "Traceback" not in err


def test_a_store_of_another_editor_is_refused(malmen: Run, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    make_bench(tmp_path / "store").service().ledger.close()  # begun by another editor
    code, _, err = malmen("serve", "--editor", save_editor(tmp_path / "run"), "--store", tmp_path / "store")
    assert code == 1 and "belongs to another editor or base model" in err


def test_the_audit_tells_whether_the_ledger_is_what_was_written(malmen: Run, tmp_path: Path) -> None:
    assert malmen("serve", "audit", "--store", tmp_path)[0] == 1
    service = make_bench(tmp_path).service()
    service.apply([Change("ann", (world_facts(1)[0],))])
    service.ledger.close()
    code, out, _ = malmen("serve", "audit", "--store", tmp_path, "--json")
    assert code == 0 and json.loads(out)["intact"] and json.loads(out)["entries"] == 2
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("UPDATE edits SET answer = 'other'")
    code, _, err = malmen("serve", "audit", "--store", tmp_path)
    assert code == 1 and "was changed" in err
