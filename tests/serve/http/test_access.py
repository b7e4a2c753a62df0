"""Tokens: made once, read by their owner alone, refused when they are wrong."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from malmen.errors import UsageError
from malmen.serve.http.access import SCOPES, VARIABLE, RateLimit, create_tokens, load_access, token_of
from malmen.serve.problems import Problem


def test_tokens_are_made_at_the_first_start_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "store" / "tokens.yaml"
    load_access(file)
    before = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    create_tokens(file)  # another process that was slower
    assert file.read_text() == before
    access = load_access(file)
    callers = [access.caller(token_of(file, role)) for role in SCOPES]
    assert [caller.scope for caller in callers] == list(SCOPES)
    assert [name.name for name in tmp_path.joinpath("store").iterdir()] == ["tokens.yaml"]


@pytest.mark.parametrize("given", [None, "", "wrong", "é"])
def test_a_wrong_token_is_nobodys(tmp_path: Path, given: str | None) -> None:
    with pytest.raises(Problem) as problem:
        load_access(tmp_path / "tokens.yaml").caller(given)
    assert problem.value.status == 401


def test_the_environment_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"ann:edit:{'a' * 20}, bob:read:{'b' * 20}")
    access = load_access(tmp_path / "tokens.yaml")
    assert access.caller("a" * 20).name == "ann" and access.caller("b" * 20).scope == "read"
    assert not (tmp_path / "tokens.yaml").exists()
    other = load_access(tmp_path / "tokens.yaml", f"eve:admin:{'e' * 20}")  # what the one who starts it passes on
    assert other.caller("e" * 20).scope == "admin"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "ann: {role: king, token: aaaaaaaaaaaaaaaaaaaa}", "ann: {role: read, token: short}", "ann: no", "{",
     "a: {role: read, token: aaaaaaaaaaaaaaaaaaaa}\nb: {role: edit, token: aaaaaaaaaaaaaaaaaaaa}"],
)  # fmt: skip
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match="tokens"):
        load_access(file)


def test_a_caller_who_asks_too_often_is_told_how_long_to_wait() -> None:
    limit = RateLimit(3)
    for _ in range(3):
        limit.count("ann")
    with pytest.raises(Problem) as problem:
        limit.count("ann")
    assert problem.value.status == 429 and 1 <= problem.value.retry_after <= 21
    limit.count("bob")
