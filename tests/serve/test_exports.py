"""Exports beside the writer's work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from endpoints import make_bench, world_facts

from malmen.export import ExportKind, verify_export
from malmen.serve.exports import export_folder, export_version
from malmen.serve.messages import Change


@pytest.mark.parametrize("kind", ["delta", "lora", "merged"])
def test_a_version_is_exported_while_the_writer_is_at_work(tmp_path: Path, kind: ExportKind) -> None:
    service = make_bench(tmp_path).service()
    (made,) = service.apply([Change("ann", tuple(world_facts(2)))])
    assert isinstance(made, dict), made
    version, manifests = made["version"], list[Any]()

    def export() -> None:
        manifests.append(export_version(service, version, kind, 512, str(tmp_path), "builtin"))

    thread = threading.Thread(target=export)
    with service.turn:  # an edit that takes long
        thread.start()
        thread.join(30)
        exclusive_folder = thread.is_alive()
    thread.join(30)
    assert not exclusive_folder, "the export waited for the writer"
    assert manifests == [verify_export(export_folder(str(tmp_path), version, kind))]
