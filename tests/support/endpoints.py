"""An editing service on the built-in model, with an editor that has seen data but no training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from malmen.config import Config, ModelConfig
from malmen.data.records import Fact
from malmen.data.world import world_records
from malmen.editor import Editor
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel, encode_batches, load_lm
from malmen.lm.trace import trace
from malmen.runs.checkpoint import save_checkpoint
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.settings import GuardConfig
from malmen.serve.writing.guards import Guards
from malmen.serve.writing.service import EditService

LENIENT = GuardConfig(min_success=0, max_shift_ratio=1e9, max_perplexity_ratio=1e9)


def untrained_editor(lm: LanguageModel, dtype: str = "float32", **editor: object) -> Editor:
    """The hyper-network is the identity at the start: with its normalisers set it is a usable editor as it is."""
    settings = {
        "layers": "last:3",
        "rank": 8,
        "edit_lr": 0.003,
        "damping": 1.0,
        "parametrisation": "relative",
        **editor,
    }
    config = Config.model_validate({"editor": settings, "model": {"dtype": dtype}})
    torch.manual_seed(0)
    made = Editor(find_layers(lm.model, config.editor.layers, config.editor.ffn), config)
    facts = [record.edit for record in world_records("train")[:128]]
    made.observe(trace(lm, made.layers, encode_batches(lm, facts, config), config.editor.tokens))
    made.base_model = lm.fingerprint()
    return made


def world_facts(number: int) -> list[Fact]:
    """Contradictions of what the built-in model knows, about people that training never sees."""
    return [record.edit for record in world_records("validation")[:number]]


@dataclass
class Bench:
    """What a service is made of, to make it again."""

    lm: LanguageModel
    editor: Editor
    folder: Path
    url: str
    guard: GuardConfig = LENIENT
    probes: tuple[Fact, ...] = ()

    def service(self) -> EditService:
        """A writer that takes over from any before it."""
        ledger = Ledger(self.url, self.lm.fingerprint(), "the editor")
        guards = Guards(self.lm, self.guard, self.probes, 4096, self.editor.config.data)
        return EditService(self.lm, self.editor, ledger, BlobStore(self.folder / "blobs"), guards)


@cache
def _built_in(dtype: str) -> tuple[LanguageModel, Editor]:
    """Both are frozen, so all tests share them."""
    lm = load_lm(ModelConfig(name="builtin", dtype=dtype))  # type: ignore[arg-type]
    return lm, untrained_editor(lm, dtype)


def make_bench(folder: Path, dtype: str = "float32", **options: object) -> Bench:
    """A fresh one in a folder, on sqlite."""
    return Bench(*_built_in(dtype), folder, f"sqlite:///{folder / 'ledger.db'}", **options)  # type: ignore[arg-type]


def save_editor(folder: Path) -> Path:
    """That editor as a run's folder, as `malmen serve --editor` takes it."""
    lm, editor = _built_in("float32")
    save_checkpoint(folder, editor, lm.fingerprint())
    return folder
