"""A rival is a module and one registry entry: the commands and the experiments take everything else from the entry."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from malmen.config import BaselinesConfig, Config
from malmen.data.records import Fact
from malmen.edit_method import PlainEdit, UntrainedMethod
from malmen.editor import require_facts
from malmen.lm.layers import LayerSpec, find_layers
from malmen.lm.model import LanguageModel
from malmen.methods.registry import METHODS, Method
from malmen.platform.cli.edit import check_method, load_method
from malmen.tune.experiments.cells import Cells, groups_of
from malmen.tune.experiments.findings import findings
from malmen.tune.experiments.results import write_results
from malmen.tune.experiments.settings import base_config, load_experiment
from malmen.tune.experiments.work import do_cells


class Nothing(UntrainedMethod):
    """Edits nothing, in 7 seconds of preparation."""

    def __init__(self, lm: LanguageModel) -> None:
        self.layers: list[LayerSpec] = find_layers(lm.model, "last:1", "second")

    def prepare(self, lm: LanguageModel) -> float:
        return 7.0

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        require_facts(facts)
        weights = {layer.name: lm.model.get_submodule(layer.name).weight for layer in self.layers}
        return PlainEdit({name: torch.zeros_like(weight).T for name, weight in weights.items()})  # GPT-2's Conv1D


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> str:
    entry = Method("nothing", "No edit", "black", "x", rounds=("again",), make=lambda lm, config: Nothing(lm))
    monkeypatch.setitem(METHODS, entry.name, entry)
    return entry.name


def test_a_new_entry_is_measured_by_the_experiments_and_drawn(nothing: str, tmp_path: Path) -> None:
    chosen = load_experiment("fast", [
        f"experiment.methods=[{nothing}]", "experiment.seeds=[0]", "experiment.edits=[2]",
        "experiment.ablation_edits=4", "experiment.rounds=2", "experiment.generate=false",
    ])  # fmt: skip
    config, kinds = base_config(chosen), {"scaling", "rounds"}
    (group,) = [group for group in groups_of(chosen, config, kinds) if group.variant.name == nothing]
    assert str(group) == "No edit, seed 0" and not group.variant.trained
    assert [(cell.edits, cell.rounds, cell.way) for cell in group.cells] == [
        (2, 1, "at once"), (4, 1, "at once"), (4, 2, "again"),
    ]  # fmt: skip
    do_cells(group, chosen, tmp_path)
    for cell in group.cells:
        measured = Cells(tmp_path).get(cell)
        assert measured is not None and measured["training_seconds"] == 7.0
        scores = measured["scores"]
        assert scores["edit_success"] == scores["edit_success_before"] and scores["locality_agreement"] == 1
    paths = {path.stem: path for path in write_results(chosen, config, tmp_path, kinds)}
    results = {kind: json.loads(path.read_text()) for kind, path in paths.items()}
    assert [row["label"] for row in results["scaling"]["rows"]] == ["No edit"]
    assert [row["label"] for row in results["rounds"]["rows"]] == ["MALMEN"] * 3 + ["No edit"] * 2
    assert 'fill="black"' in (text := paths["scaling"].with_suffix(".svg").read_text()) or "#000000" in text
    malmen = {**results["scaling"]["rows"][0], "variant": "malmen", "label": "MALMEN", "edits": 64}
    rival = {**results["scaling"]["rows"][0], "edits": 64}
    ((sentence, _),) = findings({"scaling": {"rows": [malmen, rival]}})
    assert "is above No edit" in sentence


def test_a_new_entry_is_a_method_of_the_commands(nothing: str) -> None:
    check_method(nothing, None, None, [])
    loaded = load_method(nothing, None, None, [], None)
    assert isinstance(loaded.method, Nothing) and loaded.about == {"method": nothing, "settings": {}}


def test_every_rival_has_settings_of_its_own() -> None:
    assert set(BaselinesConfig.model_fields) == set(METHODS) - {"malmen"}
    config = Config.model_validate({"baselines": {"ft": {"epochs": 3}}})
    assert METHODS["ft"].settings(config)["epochs"] == 3 and METHODS["malmen"].settings(config) == {}


def test_a_rival_may_share_the_settings_of_another() -> None:
    memit = {"clamp": 2.0, "covariance_weight": 7.0}
    own = {"memit": memit, "alphaedit": {"damping": 5.0}, "memit_history": {"covariance_weight": 3.0}}
    config = Config.model_validate({"baselines": own})
    plain, history, alpha = (METHODS[name].settings(config) for name in ("memit", "memit_history", "alphaedit"))
    assert history == {**plain, "covariance_weight": 3.0} and plain["covariance_weight"] == 7.0
    assert alpha == {**plain, "threshold": 0.02, "damping": 5.0}
    unset = Config.model_validate({"baselines": {"memit": memit}})
    assert METHODS["memit_history"].settings(unset) == METHODS["memit"].settings(unset)


def test_colours_markers_and_labels_tell_the_methods_apart() -> None:
    for field in ("label", "colour", "marker"):
        assert len({getattr(method, field) for method in METHODS.values()}) == len(METHODS)


def test_the_list_of_methods_needs_no_torch() -> None:
    code = "import sys, malmen.methods.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
