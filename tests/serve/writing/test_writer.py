"""Exports beside the writer's work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from endpoints import make_bench, world_facts
from exports import verified_manifest

from malmen.export import ExportKind
from malmen.serve.messages import Change, Export, reply_or_raise
from malmen.serve.settings import ServeConfig
from malmen.serve.writing.writer import export_version


@pytest.mark.parametrize("kind", ["delta", "lora", "merged"])
def test_a_version_is_exported_while_the_writer_is_at_work(tmp_path: Path, kind: ExportKind) -> None:
    service = make_bench(tmp_path).service()
    (made,) = service.apply([Change("ann", tuple(world_facts(2)))])
    version, manifests = str(reply_or_raise(made).reply.version), list[Any]()
    settings = ServeConfig(editor="", store=str(tmp_path))

    def export() -> None:
        manifests.append(export_version(service, Export(version, kind, 512), settings))

    thread = threading.Thread(target=export)
    with service.turn:  # an edit that takes long
        thread.start()
        thread.join(30)
        waited = thread.is_alive()
    thread.join(30)
    assert not waited, "the export waited for the writer"
    assert manifests == [verified_manifest(settings.export_folder(version, kind))]
