"""Adam over θ: its groups, its schedule, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from malmen.config import TrainingConfig

_SCALARS = (
    "edit_lr",
    "log_edit_lr",
    "log_damping",
    "log_preserved_weight",
    "log_phrasing_weight",
    "token_weight_scalars",
)


def make_adam(theta: nn.Module, training: TrainingConfig) -> torch.optim.Adam:
    """The scalars (η or log η, log λ, log w, log v, those of tokens' weights) may have a learning rate of their own."""
    scalars = [value for name, value in theta.named_parameters() if _is_scalar(name)]
    rest = [value for name, value in theta.named_parameters() if not _is_scalar(name)]
    groups = [
        {"params": rest, "lr": training.meta_lr, "initial_lr": training.meta_lr},
        {"params": scalars, "lr": training.meta_lr, "initial_lr": training.scalar_lr or training.meta_lr},
    ]
    return torch.optim.Adam(groups, fused=True)


def _is_scalar(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _SCALARS


def schedule(training: TrainingConfig, steps_done: int) -> float:
    """What the learning rates are multiplied with in the next step."""
    rising = min(1.0, (steps_done + 1) / (training.warmup_steps + 1))
    if training.schedule == "constant":
        return rising
    return rising * 0.5 * (1 + math.cos(math.pi * min(1.0, steps_done / max(1, training.steps))))


def adam_state(theta: nn.Module, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Plain tensors, by parameter."""
    return {
        f"{name}/{slot}": value
        for name, parameter in theta.named_parameters()
        for slot, value in adam.state.get(parameter, {}).items()
    }


def load_adam_state(theta: nn.Module, adam: torch.optim.Adam, tensors: Mapping[str, Tensor]) -> None:
    """What `adam_state` gave."""
    parameters = dict(theta.named_parameters())
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        adam.state[parameters[name]][slot] = value.to(parameters[name].device, copy=True)
