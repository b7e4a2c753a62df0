from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import Endpoint

from malmen.lm.model import LanguageModel


def _postgres_bin() -> Path | None:
    """Where the server's programs are; Debian keeps them off the PATH."""
    found = [Path(path).parent for path in (shutil.which("initdb"),) if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@pytest.fixture(scope="session")
def fresh_postgres() -> Iterator[Callable[[], str]]:
    """URLs of new databases in a real PostgreSQL server, which listens on a socket in a folder and on no port."""
    programs = _postgres_bin()
    if programs is None:
        pytest.skip("PostgreSQL IS NOT INSTALLED: the ledger was tried on sqlite only (apt-get install postgresql)")
    import psycopg

    # Not below pytest's own folder: the server is another user, and every pytest that starts shuts others out there.
    folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="malmen-pg-")))
    folder.chmod(0o755)
    data, as_user = folder / "data", []
    if os.geteuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]

    def run(*command: object) -> None:
        done = subprocess.run([*as_user, *map(str, command)], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    run(programs / "initdb", "-D", data, "-U", "malmen", "--auth=trust", "--no-sync")
    options = f"-c listen_addresses='' -k {folder}"
    run(programs / "pg_ctl", "-D", data, "-l", folder / "log", "-w", "-o", options, "start")

    def fresh() -> str:
        name = f"ledger_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(f"host={folder} user=malmen dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://malmen@/{name}?host={folder}"

    try:
        yield fresh
    finally:
        run(programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def little_memory() -> Callable[[LanguageModel, int], AbstractContextManager[None]]:
    """`with little_memory(lm, rows)`: a larger batch ends as it does on a GPU that is too small for it."""

    @contextmanager
    def limited(lm: LanguageModel, rows: int) -> Iterator[None]:
        def look(_module: torch.nn.Module, _args: Any, inputs: dict[str, Any]) -> None:
            if len(inputs["input_ids"]) > rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        handle = lm.model.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    return limited


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """For tests that each use facts of their own."""
    endpoint = Endpoint(
        tmp_path_factory.mktemp("endpoint"),
        limits={"job_facts": 8, "text_chars": 500},
        guard={"min_success": 0.5, "max_shift_ratio": 9, "max_perplexity_ratio": 9},
    )
    yield endpoint
    endpoint.close()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Endpoint]:
    endpoint = Endpoint(tmp_path)
    yield endpoint
    endpoint.close()
