"""Trained editors in MLflow's model registry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmen.config import Config, TrackingConfig
from malmen.errors import EditError, UsageError
from malmen.metrics import BEFORE, METRICS
from malmen.platform.tracking.store import clear_errors, connect, redact_credentials, safe_name
from malmen.platform.tracking.tracker import tracking_uri
from malmen.runs.checkpoint_lookup import latest_checkpoint, read_state

if TYPE_CHECKING:
    from mlflow import MlflowClient

# What an edit needs; the optimizer, twice as large, is only for resuming the training.
FILES = ("editor.safetensors", "config.json", "state.json")


@dataclass(frozen=True)
class RegisteredEditor:
    """A version in the registry."""

    name: str
    version: str
    uri: str  # models:/name/version


def registered_name(config: Config) -> str:
    """The configured name, else `malmen-` and the last part of the base model's name."""
    last = Path(config.model.name).name.removesuffix(".gguf")
    return config.tracking.registered_model or "malmen-" + re.sub(r"[^\w.-]+", "-", last or "model")


def register_editor(client: MlflowClient, run_id: str, checkpoint: str | Path, config: Config) -> RegisteredEditor:
    """Upload a checkpoint to its run and register it as a new version of the model, with its scores and a card."""
    from mlflow.exceptions import MlflowException

    name, checkpoint = registered_name(config), Path(latest_checkpoint(checkpoint))
    if missing := [file for file in FILES if not (checkpoint / file).is_file()]:
        raise EditError(f"{checkpoint} cannot be registered: it lacks {', '.join(missing)}")
    state = read_state(checkpoint)
    # By step: a run that was given more steps registers again, and older versions stay as they are.
    artifact = f"editor/checkpoint-{state['step']:07d}"
    for version in client.search_model_versions(f"name='{name}'"):
        if version.run_id == run_id and str(version.source).endswith(f"/{artifact}"):  # registered by a killed driver
            return RegisteredEditor(name, str(version.version), f"models:/{name}/{version.version}")
    card, settings = editor_card(config, state), (checkpoint / "config.json").read_text(encoding="utf-8")
    client.log_artifact(run_id, str(checkpoint / "editor.safetensors"), artifact)
    client.log_artifact(run_id, str(checkpoint / "state.json"), artifact)
    client.log_text(run_id, redact_credentials(settings), f"{artifact}/config.json")
    client.log_text(run_id, card, f"{artifact}/README.md")
    try:
        client.create_registered_model(name, description="MALMEN editors: see the versions")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    numbers = {key: value for key, value in state["scores"].items() if isinstance(value, int | float)}
    tags = {"base_model": state["base_model"], **{safe_name(key): f"{value:.6g}" for key, value in numbers.items()}}
    source = f"{client.get_run(run_id).info.artifact_uri}/{artifact}"
    created = client.create_model_version(name, source=source, run_id=run_id, tags=tags, description=card)
    return RegisteredEditor(name, str(created.version), f"models:/{name}/{created.version}")


def download_editor(uri: str, tracking: str | None = None) -> Path:
    """The local folder of `models:/name/version` or `models:/name@alias`; read only.

    Without `tracking`, the store is the environment's, else runs/mlflow.db, the default of `malmen train`.
    """
    parts = re.fullmatch(r"models:/(?P<name>[^/@:'\"]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))", uri)
    if parts is None:
        raise UsageError(f"cannot read {uri!r}: expected models:/NAME/VERSION or models:/NAME@ALIAS")
    store = tracking_uri(TrackingConfig(uri=tracking), "runs/any")
    with clear_errors(store):
        import mlflow.artifacts

        client = connect(store, create=False)
        version = _find_version(client, parts["name"], parts["version"], parts["alias"], redact_credentials(store))
        # download_artifacts("models:/…") looks in the process's global registry whatever URIs it is given.
        source = client.get_model_version_download_uri(parts["name"], version)
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=source, tracking_uri=store))
    if not (folder / "state.json").is_file():
        raise EditError(f"{uri} in {redact_credentials(store)} is no editor: {folder} has no state.json")
    return folder


def _find_version(client: MlflowClient, name: str, version: str | None, alias: str | None, store: str) -> str:
    versions = sorted(int(existing.version) for existing in client.search_model_versions(f"name='{name}'"))
    if not versions:
        others = sorted(model.name for model in client.search_registered_models())
        raise EditError(f"no editor {name!r} is registered in {store}; {_list('registered:', others)}")
    if alias is not None:
        aliases = {key: str(value) for key, value in client.get_registered_model(name).aliases.items()}
        if alias not in aliases:
            known = [f"{key} (version {value})" for key, value in sorted(aliases.items())]
            raise EditError(
                f"{name!r} has no alias {alias!r}; {_list('aliases:', known)}, {_list('versions:', versions)}"
            )
        version = aliases[alias]
    assert version is not None
    if int(version) not in versions:
        raise EditError(f"{name!r} has no version {version} in {store}; {_list('versions:', versions)}")
    return version


def _list(word: str, names: Sequence[object]) -> str:
    return f"{word} {', '.join(map(str, names)) or 'none'}"


def editor_card(config: Config, state: Mapping[str, Any]) -> str:
    """The model card of a checkpoint with this state, in markdown."""
    scores = state["scores"]
    layers = config.editor.layers if isinstance(config.editor.layers, str) else ", ".join(config.editor.layers)
    linears = f"{config.editor.ffn} linear of the FFN" + ", last linear of the attention" * config.editor.attention
    edits = scores.get("edits") or config.training.eval_edits or config.training.num_edits
    table = "\n".join(
        f"| {name.replace('_', ' ')} ({label}) | {_share(scores, name + BEFORE)} | {_share(scores, name)} |"
        for name, label, _ in METRICS
    )
    return f"""\
# Editor for {config.model.name}

A MALMEN hyper-network that rewrites many facts in this language model at once, by one change of weights.

| | |
|---|---|
| base model | `{config.model.name}`, weights `{state["base_model"]}` |
| edited layers | {layers} ({linears}), {config.editor.aggregation} |
| trained on | {config.data.train}, {state["step"]} steps of {config.training.num_edits} edits, seed {config.seed} |
| measured on | {config.data.validation}, {edits} edits at once |

| | before | after |
|---|---|---|
{table}

Shares of right answer tokens, teacher-forced. LS counts right answers to unrelated prompts: it should not fall.

## Use

```
malmen edit --editor models:/{registered_name(config)}/VERSION --facts facts.jsonl
```

## Limits

- It works only on the weights it was trained for; others are refused by their fingerprint.
- Scores hold for facts like those it was trained on, about that many at once; `malmen eval` measures your own.
- An edit changes what is answered to a prompt and its rephrasings, not what follows from the fact.
"""


def _share(scores: Mapping[str, float | None], name: str) -> str:
    value = scores.get(name)
    return "–" if value is None else f"{value:.1%}"
