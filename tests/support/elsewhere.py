"""A storage that only fsspec knows, for all processes of a test: elsewhere:///folder is that folder of this disk.

fsspec finds it by the entry point in elsewhere-1.0.dist-info, as it finds any storage's package.
"""

from __future__ import annotations

from typing import Any

from fsspec.implementations.local import LocalFileSystem


class ElsewhereFileSystem(LocalFileSystem):
    protocol = "elsewhere"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("elsewhere://").rstrip("/") or "/"
