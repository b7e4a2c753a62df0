from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from malmen.errors import EditError
from malmen.platform.tracking.store import (
    absolute,
    clear_errors,
    connect,
    find_experiment,
    redact_credentials,
    safe_name,
)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken and answers nobody."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def refusal(uri: str) -> str:
    with pytest.raises(EditError) as refused, clear_errors(uri):
        connect(uri)
    return str(refused.value)


@pytest.mark.parametrize("scheme", ["http", "postgresql", "mysql+pymysql"])
def test_a_server_that_is_not_there_is_refused_within_seconds(scheme: str, closed_port: int) -> None:
    message = refusal(f"{scheme}://me:secret@127.0.0.1:{closed_port}/tracked")
    assert f"{scheme}://me:***@127.0.0.1:{closed_port}/tracked" in message
    assert "refused" in message
    assert "secret" not in message
    assert "tracking.enabled=false" in message


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("a text that is long enough to be looked at as the header of a database" * 20)
    assert "file is not a database" in refusal(f"sqlite:///{tmp_path}/mlflow.db")


def test_a_store_of_an_unknown_kind_is_refused() -> None:
    assert "unsupported URI" in refusal("carrier-pigeon://coop")


def test_a_store_that_is_only_read_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="no MLflow store"):
        connect(f"sqlite:///{tmp_path}/mlflow.db", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # makes the tables
def test_drivers_that_start_at_once_share_an_experiment(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    clients = [connect(uri) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda client: find_experiment(client, "shared", uri), clients))
    assert len(found) == 1
    assert clients[0].get_experiment(found.pop()).artifact_location == str(tmp_path / "mlartifacts")


def test_passwords_are_not_shown() -> None:
    assert redact_credentials('{"uri": "http://me:p%40ss@host:80/x"}') == '{"uri": "http://me:***@host:80/x"}'
    assert redact_credentials("http://host:5000/path") == "http://host:5000/path"
    assert redact_credentials("sqlite:////tmp/a@b:c/mlflow.db") == "sqlite:////tmp/a@b:c/mlflow.db"


def test_any_name_becomes_one_that_mlflow_takes() -> None:
    assert safe_name("transformer.h.0/lr (λ)[1]") == "transformer.h.0/lr ____1_"


def test_a_store_is_the_same_for_a_process_that_works_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("sqlite:///runs/mlflow.db") == f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    for uri in (f"sqlite:///{tmp_path / 'a.db'}", "http://host:5000", "postgresql://user@host/db"):
        assert absolute(uri) == uri
