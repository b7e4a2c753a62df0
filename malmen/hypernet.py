"""The hyper-network g_θ of MEND and MALMEN: a fine-tuning gradient in, a targeted one out (appendix A.1).

A token of a layer gives its key u and value gradient ∇_v L. Their concatenation is normalised, passed
through low-rank residual blocks and split again into the pseudo key ũ and the pseudo gradient ∇̃_v L.
Layers of one shape share the blocks; statistics, scale, shift, edit-lr and damping are each layer's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from malmen.config import EditorConfig, PreservedTerm
from malmen.errors import EditError
from malmen.lm.trace import LayerTrace, Traces
from malmen.preserved import Preserved, TermMoments

_SMALLEST_SQUARE = 1e-8  # mean square of a normalised gradient, below which all gradients count as 0
_ROUNDING = 1e-7  # of float32 features, relative to their mean
_MOMENTS: dict[PreservedTerm, str] = {"unrelated": "moments", "phrasing": "phrasing_moments"}  # the buffers' names


@dataclass(frozen=True)
class Statistics:
    """Count, mean and squared deviations of rows of one layer, in float64."""

    count: Tensor  # ()
    mean: Tensor  # (features,)
    squares: Tensor  # sum of squared deviations (features,)

    @classmethod
    def of(cls, rows: Tensor) -> Statistics:
        """Of these rows (tokens, features); an empty list is allowed."""
        rows = rows.double()
        mean = rows.mean(0) if len(rows) else rows.new_zeros(rows.shape[1])
        return cls(rows.new_tensor(float(len(rows))), mean, (rows - mean).square().sum(0))

    def merged(self, other: Statistics) -> Statistics:
        """Of the rows of both, exactly (Chan et al.)."""
        total = (self.count + other.count).clamp(min=1)
        delta = other.mean - self.mean
        squares = self.squares + other.squares + delta.square() * self.count * other.count / total
        return Statistics(self.count + other.count, self.mean + delta * other.count / total, squares)


class RunningNorm(nn.Module):
    """Mean and deviation of each feature over all rows ever observed, for each of several layers.

    Batches are merged exactly, so any cut of the rows gives the same statistics. They
    change in `merge` only, which only training calls: an edit never depends on earlier edits.
    """

    count: Tensor  # (layers,)
    mean: Tensor  # (layers, features)
    squares: Tensor  # sum of squared deviations (layers, features)

    def __init__(self, num_layers: int, num_features: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(num_layers, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(num_layers, num_features, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(num_layers, num_features, dtype=torch.float64))

    @torch.no_grad()
    def merge(self, layer: int, rows: Statistics) -> None:
        """Add these rows to the layer's statistics."""
        both = Statistics(self.count[layer], self.mean[layer], self.squares[layer]).merged(rows)
        self.count[layer], self.mean[layer], self.squares[layer] = both.count, both.mean, both.squares

    def deviation(self) -> Tensor:
        """Standard deviations (layers, features); 1 where a feature has shown no variation."""
        deviation = (self.squares / self.count.clamp(min=1)[:, None]).sqrt()
        # A feature that never varied has a deviation of rounding errors only: dividing by it would blow them up.
        return torch.where(deviation > _ROUNDING * self.mean.abs(), deviation, torch.ones_like(deviation))

    def forward(self, layers: Tensor, rows: Tensor) -> Tensor:
        mean, deviation = self.mean.to(rows.dtype), self.deviation().to(rows.dtype)
        return (rows - mean[layers]) / deviation[layers]


class LowRankBlock(nn.Module):
    """z + max(0, scale_ℓ ⊙ (U V z + b) + shift_ℓ); the identity at the start because U, b and shift are zero."""

    def __init__(self, num_layers: int, num_features: int, settings: EditorConfig) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(settings.rank, num_features))
        self.up = nn.Parameter(torch.zeros(num_features, settings.rank))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.scale = nn.Parameter(torch.ones(num_layers, num_features))
        self.shift = nn.Parameter(torch.zeros(num_layers, num_features))
        (nn.init.normal_ if settings.parametrisation == "paper" else nn.init.xavier_uniform_)(self.down)

    def forward(self, layers: Tensor, rows: Tensor) -> Tensor:
        change = nn.functional.linear(nn.functional.linear(rows, self.down), self.up, self.bias)
        return _AddPositive.apply(rows, change, self.scale, self.shift, layers)  # type: ignore[no-any-return, no-untyped-call]


class _AddPositive(torch.autograd.Function):
    """rows + max(0, scale_ℓ ⊙ change + shift_ℓ); keeps half of what autograd would.

    Where the sum is exactly 0 the gradient passes, unlike relu's: at the start all sums are.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, change: Tensor, scale: Tensor, shift: Tensor, layers: Tensor) -> Tensor:
        added = (scale[layers] * change).add_(shift[layers])
        negative = added < 0
        ctx.save_for_backward(change, negative, scale, layers)
        return added.masked_fill_(negative, 0).add_(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        change, negative, scale, layers = ctx.saved_tensors
        added_grad = grad.masked_fill(negative, 0)
        members = nn.functional.one_hot(layers, len(scale)).to(grad).T  # (layers, tokens): products with it are sums
        shift_grad, scale_grad = members @ added_grad, members @ (added_grad * change)
        return grad, added_grad.mul_(scale[layers]), scale_grad, shift_grad, None


class HyperNetwork(nn.Module):
    """g_θ for the layers of one shape.

    `parametrisation` decides how far a step of Adam goes. `paper`: η itself is a parameter, and V starts from N(0, 1),
    so that steps of 1e-5 change what comes out. `relative`: log η is the parameter, and V starts as Xavier's, so that
    a step is a relative change; its learning rates are 10 to 1000 times larger.
    """

    def __init__(self, num_layers: int, key_size: int, value_size: int, settings: EditorConfig) -> None:
        super().__init__()
        self.key_size, self.value_size = key_size, value_size
        num_features = key_size + value_size
        self.norm = RunningNorm(num_layers, num_features)
        self.blocks = nn.ModuleList(LowRankBlock(num_layers, num_features, settings) for _ in range(settings.blocks))

        def scalars(start: float) -> nn.Parameter:
            return nn.Parameter(torch.full((num_layers,), start))

        if settings.parametrisation == "paper":
            self.edit_lr = scalars(settings.edit_lr)
        else:
            self.log_edit_lr = scalars(math.log(settings.edit_lr))
        self.log_damping = scalars(math.log(settings.damping))
        self.log_preserved_weight: nn.Parameter | None = None
        self.log_phrasing_weight: nn.Parameter | None = None
        self.terms = settings.preserved_terms
        if settings.learn_preserved_weight and settings.preserved_weight > 0:
            self.log_preserved_weight = scalars(math.log(settings.preserved_weight))
        if settings.learn_preserved_weight and settings.phrasing_weight > 0:
            self.log_phrasing_weight = scalars(math.log(settings.phrasing_weight))
        self.token_weight: nn.Parameter | None = None
        self.token_weight_scalars: nn.Parameter | None = None
        if settings.weighing:  # 0: every token weighs 1
            self.token_weight = nn.Parameter(torch.zeros(num_layers, num_features))
            self.token_weight_scalars = nn.Parameter(torch.zeros(num_layers, 2))  # a constant, and a slope
        # E[u uᵀ] of each term (layers, key, key), as `Editor.preserve` is given them. Rounded to θ's type: that is
        # another such matrix, within 1e-7 of it, and where there is a λ it keeps the equation definite.
        for term, name in _MOMENTS.items():
            unknown = torch.full((num_layers, key_size, key_size), torch.nan) if term in self.terms else None
            self.register_buffer(name, unknown)
        self._settings = settings
        self._key_moments: dict[int, TermMoments] = {}  # by layer, of these buffers at these versions:
        self._known: list[tuple[Tensor, int]] = []

    def eta(self) -> Tensor:
        """η of each layer (layers,)."""
        return self.edit_lr if hasattr(self, "edit_lr") else self.log_edit_lr.exp()

    def damping(self) -> Tensor:
        """λ_ℓ in float64 (layers,)."""
        return self.log_damping.double().exp()

    def features(self, keys: Tensor, value_grads: Tensor) -> Tensor:
        """Keys and value gradients as the network's input (tokens, key + value)."""
        return torch.cat((keys, value_grads), dim=-1).to(self.log_damping.dtype)

    def term_moments(self) -> list[Tensor]:
        """E[u uᵀ] of each term (layers, key, key)."""
        return [cast(Tensor, getattr(self, _MOMENTS[term])) for term in self.terms]

    def log_weights(self) -> list[nn.Parameter | None]:
        """The logarithm of each term's weight (layers,); None where it is not learned."""
        learned = {"unrelated": self.log_preserved_weight, "phrasing": self.log_phrasing_weight}
        return [learned[term] for term in self.terms]

    def weights(self, index: int) -> list[Tensor]:
        """The weight of each term in a layer, in float64, with its gradient where it is learned."""
        given = {"unrelated": self._settings.preserved_weight, "phrasing": self._settings.phrasing_weight}
        return [
            torch.tensor(given[term], dtype=torch.float64) if log_weight is None else log_weight[index].double().exp()
            for term, log_weight in zip(self.terms, self.log_weights(), strict=True)
        ]

    def preserved(self, index: int, *, keep: bool) -> Preserved | None:
        """The terms of a layer, if there are any; `keep` if solves with the same θ follow."""
        if not self.terms:
            return None
        moments, settings, known = self.term_moments(), self._settings, self._key_moments
        if [(id(moment), version) for moment, version in self._known] != [(id(new), new._version) for new in moments]:
            self._known = [(moment, moment._version) for moment in moments]  # moved, loaded or set
            known.clear()
        if index not in known:
            if not all(bool(torch.isfinite(moment[index]).all()) for moment in moments):
                raise EditError(
                    f"{settings.preserving_words}, but this editor has no keys to preserve: "
                    "create it with malmen.training.make_editor, or call its `preserve`"
                )
            known[index] = TermMoments([moment[index] for moment in moments], settings.preserved_null_space)
        return Preserved(known[index], [float(weight.detach()) for weight in self.weights(index)], keep)

    def forward(self, layers: Tensor, keys: Tensor, value_grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """ũ (tokens, key), −η ∇̃_v L (tokens, value) and, if tokens have weights, their square roots (tokens,);
        `layers` (tokens,) says whose token each row is."""
        rows = inputs = self.norm(layers, self.features(keys, value_grads))
        for block in self.blocks:
            rows = block(layers, rows)
        pseudo_keys, pseudo_grads = rows.split((self.key_size, self.value_size), dim=-1)
        roots = None if self.token_weight is None else self._weight_roots(layers, inputs, rows)
        return pseudo_keys, -self.eta()[layers, None] * pseudo_grads, roots

    def _weight_roots(self, layers: Tensor, inputs: Tensor, rows: Tensor) -> Tensor:
        """softplus of a linear map of the output and of log ‖∇_v L‖: a token that is right already has a gradient near
        0, which no linear map can tell from one of either sign."""
        assert self.token_weight is not None and self.token_weight_scalars is not None
        constant, slope = self.token_weight_scalars[layers].unbind(-1)
        size = inputs[:, self.key_size :].square().mean(-1).clamp(min=_SMALLEST_SQUARE).log() / 2
        logits = (rows * self.token_weight[layers]).sum(-1) + constant + slope * size
        return nn.functional.softplus(logits) / math.log(2)  # positive, 1 at the start, and as near 0 as is wanted


@dataclass
class HypernetRows:
    """The hyper-network's output for consecutive tokens of one layer."""

    layer: str
    rows: slice
    pseudo_keys: Tensor  # ũ (rows, key)
    scaled_grads: Tensor  # −η ∇̃_v L (rows, value)
    keys: Tensor  # u (rows, key)
    weight_roots: Tensor | None  # √w (rows,) of the rows' weights w in the least squares; None: all are 1

    def value_diffs(self) -> Tensor:
        """d_j = S_j u_j = −η (ũ_jᵀu_j) ∇̃_v L (rows, value); S_j itself is never formed."""
        return (self.pseudo_keys * self.keys).sum(-1, keepdim=True) * self.scaled_grads


def run_in_batches(
    net: HyperNetwork, layers: Sequence[str], traces: Traces, rows_at_once: int, *, grad: bool
) -> Iterator[list[HypernetRows]]:
    """The network over all tokens of its layers, batch by batch; layers without traces are left out."""
    counts = [len(traces[name].keys) if name in traces else 0 for name in layers]
    for batch in _cut(counts, rows_at_once):
        parts = [LayerTrace(*(part[rows] for part in traces[layers[index]])) for index, rows in batch]
        sizes = [len(part.keys) for part in parts]
        keys = torch.cat([part.keys for part in parts]).to(net.log_damping)
        value_grads = torch.cat([part.value_grads for part in parts])
        members = torch.cat([torch.full((size,), index) for (index, _), size in zip(batch, sizes, strict=True)])
        with torch.set_grad_enabled(grad):
            pseudo_keys, scaled_grads, roots = net(members.to(keys.device), keys, value_grads)
        root_parts = [None] * len(sizes) if roots is None else roots.split(sizes)
        outputs = zip(
            batch, pseudo_keys.split(sizes), scaled_grads.split(sizes), keys.split(sizes), root_parts, strict=True
        )
        yield [HypernetRows(layers[index], rows, *tensors) for (index, rows), *tensors in outputs]


def _cut(counts: Sequence[int], rows_at_once: int) -> list[list[tuple[int, slice]]]:
    """Cut members of these sizes, laid end to end, into batches of (member, rows)."""
    batches: list[list[tuple[int, slice]]] = []
    room = 0
    for member, count in enumerate(counts):
        start = 0
        while start < count:
            if room == 0:
                batches.append([])
                room = rows_at_once
            stop = min(count, start + room)
            batches[-1].append((member, slice(start, stop)))
            room -= stop - start
            start = stop
    return batches
