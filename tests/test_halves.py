"""`make test` in two halves (tests/support/halves.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from halves import exit_code


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([0, 1], 1), ([1, 0], 1), ([0, -9], 137), ([-11, 0], 139), ([5, 0], 0), ([5, 1], 1), ([5, 5], 5)],
)
def test_a_half_that_fails_or_is_killed_fails_both(codes: list[int], expected: int) -> None:
    assert exit_code(codes) == expected


def test_every_test_is_in_one_half_and_what_fails_is_shown(tmp_path: Path) -> None:
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    ray: r\n    chaos: c\n")
    (tmp_path / "test_both.py").write_text(
        "import pytest\n\n\n@pytest.mark.ray\ndef test_with_ray():\n    pass\n\n\n"
        "def test_without():\n    assert False, 'as it should'\n\n\n"
        "@pytest.mark.ray\n@pytest.mark.chaos\ndef test_kills():\n    assert False, 'left out'\n"
    )
    command = [sys.executable, str(here / "support" / "halves.py"), "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1 and "as it should" in ran.stdout and "left out" not in ran.stdout
    assert "1 passed, 2 deselected" in ran.stdout and "1 failed, 2 deselected" in ran.stdout
