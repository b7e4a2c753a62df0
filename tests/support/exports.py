"""What an export's manifest states of its files, compared with the files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def verified_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an export whose every file is as it states."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert files.keys() == manifest["files"].keys() | {"manifest.json"} and manifest["files"]
    for name, stated in manifest["files"].items():
        assert stated == {"sha256": hashlib.sha256(files[name]).hexdigest(), "bytes": len(files[name])}, name
    return manifest
