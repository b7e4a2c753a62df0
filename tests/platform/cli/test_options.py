from __future__ import annotations

from pathlib import Path

import pytest

from malmen.errors import UsageError
from malmen.platform.cli.options import shipped_file


def test_a_file_is_found_by_its_path_before_a_shipped_one_of_that_name(tmp_path: Path) -> None:
    shipped, own = tmp_path / "small.yaml", tmp_path / "own"
    shipped.touch()
    own.touch()
    assert shipped_file(tmp_path, "small", "config") == shipped
    assert shipped_file(tmp_path, str(own), "config") == own
    with pytest.raises(UsageError, match=r"no config 'large': neither a file nor one of those shipped \(small\)"):
        shipped_file(tmp_path, "large", "config")
