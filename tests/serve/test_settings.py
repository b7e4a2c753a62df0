"""The endpoint's settings: where they come from, and where they put files."""

from __future__ import annotations

from pathlib import Path

import pytest

from malmen.errors import UsageError
from malmen.serve.settings import ServeConfig, load_settings, parse_settings


def test_overrides_come_before_options_and_options_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.yaml"
    file.write_text("editor: file\nstore: file\nguard: {min_success: 0.5, num_probes: 3}\n")
    settings = load_settings(file, ["guard.min_success=0.7", "store=override"], editor="option", store="option")
    assert (settings.editor, settings.store) == ("option", "override")
    assert (settings.guard.min_success, settings.guard.num_probes) == (0.7, 3)


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(UsageError, match=r"args: .*unknown key 'gaurd'.*guard"):
        parse_settings({"editor": "run", "gaurd": {}}, "args")


def test_everything_that_is_kept_lies_in_the_store_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    settings = ServeConfig(editor="run", store=str(tmp_path))
    assert settings.database_url == f"sqlite:///{tmp_path / 'ledger.db'}"
    assert settings.tokens_file == tmp_path / "tokens.yaml" and settings.blob_folder == tmp_path / "blobs"
    assert settings.export_folder("v1", "lora") == tmp_path / "exports" / "v1-lora"
    elsewhere = settings.model_copy(update={"tokens": "/etc/tokens", "database": "postgresql://db/malmen"})
    assert (elsewhere.tokens_file, elsewhere.database_url) == (Path("/etc/tokens"), "postgresql://db/malmen")
