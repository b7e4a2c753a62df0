"""Configs from YAML files, presets and overrides; errors name every wrong key and the nearest right one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from malmen.config.settings import Config
from malmen.errors import UsageError

FAST = {  # the preset `fast`: what learns in tens of steps on models of up to some 100M parameters
    "editor.parametrisation": "relative",
    "editor.tokens": "all",
    "editor.edit_lr": 5e-4,
    "training.meta_lr": 1e-4,
    "training.scalar_lr": 2e-2,
    "training.schedule": "cosine",
    "training.locality_coef": 1.5,
}


def load_config(path: Path | None, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> Config:
    """The config of a YAML file; `settings` by key come on top of it, `section.key=value` overrides on top of both.

    The file's own keys replace those of its `preset: NAME`; the override `preset=NAME` replaces the file's.
    """
    file = {} if path is None else read_yaml(path, "config")
    values = [("preset", file.pop("preset", "paper")), *flatten(file).items()]
    values += [(full_key(key), value) for key, value in [*(settings or {}).items(), *map(read_override, overrides)]]
    raw: dict[str, Any] = {}
    for key, value in values:
        for name, setting in preset_values(value).items() if key == "preset" else [(key, value)]:
            set_key(raw, name, setting)
    return parse_config(raw, str(path) if path else "the overrides")


def preset_values(name: str) -> dict[str, Any]:
    """The settings of a preset by `section.key`; `paper`: the same keys with their defaults, the paper's."""
    if name not in ("paper", "fast"):
        raise UsageError(f"unknown preset {name!r}: expected `paper` or `fast`")
    defaults = {row["key"]: row["default"] for row in describe_settings()}
    return {key: defaults[key] if name == "paper" else value for key, value in FAST.items()}


def stored_config(raw: dict[str, Any], source: str) -> Config:
    """A config that was stored with a run; one that does not name `editor.parametrisation` is older, so `relative`."""
    editor = {"parametrisation": "relative", **raw.get("editor", {})}
    return parse_config({**raw, "editor": editor}, source)


def absolute_paths(config: Config) -> Config:
    """The config with absolute paths of existing files and folders, for processes with another working directory."""
    raw = config.model_dump(mode="json")
    for values, key in ((raw["data"], "train"), (raw["data"], "validation"), (raw["model"], "name")):
        if values[key] != "builtin" and Path(values[key]).exists():
            values[key] = str(Path(values[key]).absolute())
    for section in ("batch", "own_text"):
        if folder := raw[section]["cache_dir"]:
            raw[section]["cache_dir"] = str(Path(folder).expanduser().absolute())
    return parse_config(raw, "the config")


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The sections and keys of a YAML file; `what` names it in errors."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"the {what} {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"the {what} {path} holds a {type(raw).__name__}; expected sections with keys")
    return raw


def parse_config(raw: dict[str, Any], source: str) -> Config:
    """A config from plain values; UsageError names every wrong key and the nearest right one."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise usage_error(source, error, known_keys()) from error


def usage_error(source: str, error: ValidationError, known: Sequence[str]) -> UsageError:
    """All problems of the settings in `source` in one message; `known` are the keys that exist."""
    problems = dict.fromkeys(explain(problem, known) for problem in error.errors())
    return UsageError(f"{source}: " + "; ".join(problems))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by `section.key`. An empty section is a value: it stays."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


def known_keys() -> list[str]:
    """Every setting as `section.key`."""
    return [row["key"] for row in describe_settings()]


def describe_settings(model: type[BaseModel] = Config, prefix: str = "") -> list[dict[str, Any]]:
    """Rows of key, default and description, one for each setting."""
    rows: list[dict[str, Any]] = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += describe_settings(annotation, f"{prefix}{name}.")
        else:
            rows.append({"key": prefix + name, "default": field.default, "description": field.description or ""})
    return rows


def read_override(override: str) -> tuple[str, Any]:
    """Key and value of an override `key=value`; the value is YAML."""
    name, equals, value = override.partition("=")
    if not equals:
        raise UsageError(f"cannot read the override {override!r}: expected `key=value`, e.g. training.steps=100")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"cannot read the value of {override!r}: expected YAML, e.g. 100, true or [a, b]") from error


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in plain values."""
    *sections, last = key.split(".")
    for part in sections:
        raw = raw.setdefault(part, {})
        if not isinstance(raw, dict):
            raise UsageError(f"cannot set {key!r}: {part!r} is a setting, not a section")
    raw[last] = value


def full_key(name: str) -> str:
    """`aggregation` is enough for `editor.aggregation` where only one section has such a key."""
    if "." in name or name in Config.model_fields:
        return name
    matches = [key for key in known_keys() if key.endswith(f".{name}") and not key.startswith("baselines.")]
    return matches[0] if len(matches) == 1 else name


def explain(problem: Any, known: Sequence[str]) -> str:
    """One of pydantic's errors in the words of the config file; `known` are the keys that exist."""
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
        return f"unknown key {name!r}; did you mean {' or '.join(near)}?"
    return f"{name}: {problem['msg']} (given {problem['input']!r})"
