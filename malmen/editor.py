"""The editor: Algorithms 1 and 2 of the paper, with the LM and the hyper-network kept apart.

One meta-training step reads `observe · solve · (the LM's meta loss) · backward · step`; an edit is
`solve` alone. The hyper-network runs in batches of any size, so memory for its activations is constant
in the number of edits; where one batch holds everything, its activations are kept instead of recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from malmen.adam import adam_state, load_adam_state, make_adam, schedule
from malmen.config import Config
from malmen.data.records import Fact
from malmen.errors import EditError, check_base_model
from malmen.hypernet import HypernetRows, HyperNetwork, Statistics, run_in_batches
from malmen.least_squares import ROWS_AT_ONCE, NormalEquation, Pullback, solve_least_squares, token_residuals
from malmen.lm.devices import release_freed_memory, slices_products
from malmen.lm.layers import LayerSpec
from malmen.lm.trace import Traces, trace
from malmen.preserved import Preserved
from malmen.shards import Shards, SolvedShard

if TYPE_CHECKING:  # a process that only holds an editor does not wait for transformers
    from malmen.lm.model import LanguageModel


class LayerTargets(NamedTuple):
    """Rows are tokens, each times the root of its weight. Under `aggregation: sum` they are pseudo keys and scaled
    gradients: S = Σ diffᵀ key."""

    keys: Tensor  # u (tokens, key)
    value_diffs: Tensor  # d (tokens, value)


@dataclass
class Solved:
    """The shifts of one set of edits, and what `backward` needs of their computation."""

    traces: Traces
    shifts: dict[str, Tensor]  # S* in float64
    solutions: dict[str, SolvedShard] = field(default_factory=dict)
    value_diffs: dict[str, Tensor] = field(default_factory=dict)
    weight_roots: dict[str, Tensor] = field(default_factory=dict)  # (tokens,), where tokens have weights
    kept: dict[str, list[HypernetRows]] = field(default_factory=dict)  # by network, with the graph

    def mean_residual(self) -> float | None:
        """MR: the mean of the residuals over layers and tokens (§5.2); None for a sum, which solves nothing."""
        return float(self.residuals().mean()) if self.value_diffs else None

    def residuals(self) -> Tensor:
        """r_j = ‖S*u_j − d_j‖ / ‖d_j‖ of each layer and token."""
        residuals = [torch.zeros(0, dtype=torch.float64)]
        for name, diffs in self.value_diffs.items():
            for keys, part in zip(self.traces[name].keys.split(ROWS_AT_ONCE), diffs.split(ROWS_AT_ONCE), strict=True):
                residuals.append(token_residuals(keys.double(), self.shifts[name], part.double()).cpu())
        return torch.cat(residuals)


class Editor(nn.Module):
    """θ for a set of layers: one hyper-network per layer shape.

    Several editors may share the work: each then has the traces of a part of the layers and tokens, and
    exchanges sums with the others through `shards` (shards.py).
    """

    def __init__(self, layers: Sequence[LayerSpec], config: Config) -> None:
        super().__init__()
        if not layers:
            raise EditError("an editor needs at least one layer to edit")
        self.layers, self.config = list(layers), config
        self.shards = Shards()  # replaced where several editors share the work
        self.groups: dict[str, list[LayerSpec]] = {}
        for layer in layers:
            self.groups.setdefault(f"{layer.key_size}x{layer.value_size}", []).append(layer)
        self.nets = nn.ModuleDict(
            {
                shape: HyperNetwork(len(members), members[0].key_size, members[0].value_size, config.editor)
                for shape, members in self.groups.items()
            }
        )
        self.steps_done = 0
        self.locality_coef = config.training.locality_coef  # λ_loc of the next step of training
        self.base_model: str | None = None  # the fingerprint of the LM that θ was trained for, once known
        self.last_grad_norm = math.nan
        self._optimizer: torch.optim.Adam | None = None
        if config.model.dtype == "float64":
            self.double()

    @classmethod
    def from_pretrained(cls, folder: str | Path, lm: LanguageModel | None = None) -> Editor:
        """A trained editor; with `lm` given, refused unless it was trained for that very model."""
        from malmen.runs.checkpoint import load_editor

        return load_editor(folder, lm)

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> Solved:
        """Algorithm 1: the shifts that make all these facts hold at once."""
        require_facts(facts)
        if self.base_model is not None:
            check_base_model(f"this editor of {self.config.model.name}", self.base_model, lm.fingerprint())
        from malmen.lm.model import encode_batches

        self.to(lm.device)
        batches = encode_batches(lm, facts, self.config)
        return self.solve(trace(lm, self.layers, batches, self.config.editor.tokens))

    @torch.no_grad()
    def observe(self, traces: Traces) -> None:
        """Merge the traces into the running normalisers; training only."""
        mine = {}
        for name, (keys, value_grads) in traces.items():
            net, _ = self._find(name)
            parts = zip(keys.split(ROWS_AT_ONCE), value_grads.split(ROWS_AT_ONCE), strict=True)
            mine[name] = reduce(Statistics.merged, (Statistics.of(net.features(*part)) for part in parts))
        for name, statistics in self.shards.gather_statistics(mine):
            net, index = self._find(name)
            net.norm.merge(index, statistics)

    @torch.no_grad()
    def preserve(self, moments: Mapping[str, Tensor]) -> None:
        """Set E[u uᵀ] of each of `config.editor.preserved_terms` by layer (terms, key, key)."""
        for name, terms in moments.items():
            net, index = self._find(name)
            assert net.terms, "no keys are preserved, or the shifts are summed"
            if not bool(torch.isfinite(terms).all()):
                raise EditError(f"layer {name}: the keys to preserve are not finite")
            for known, moment in zip(net.term_moments(), terms, strict=True):
                assert moment.shape == known[index].shape, (moment.shape, known[index].shape)
                known[index] = moment

    def damping(self) -> dict[str, float]:
        """λ_ℓ by layer."""
        if not self.config.editor.regularisation:
            return {layer.name: 0.0 for layer in self.layers}
        return self._scalars(HyperNetwork.damping)

    def edit_lr(self) -> dict[str, float]:
        """η by layer."""
        return self._scalars(HyperNetwork.eta)

    def solve(self, traces: Traces, *, training: bool = False) -> Solved:
        """Stage (iii): traces to shifts. `training` keeps activations where they fit in one batch."""
        solved = Solved(traces, {})
        kept = solved.kept if training else None
        if self.config.editor.aggregation == "sum":
            solved.shifts = self._sum_shifts(traces, kept)
            finite(solved.shifts, "check the value gradients and the editor")
            return solved
        solved.value_diffs, solved.weight_roots = self._value_diffs(traces, kept)
        damping = self.damping()
        for name in solved.value_diffs:
            try:
                rows, preserved = self._weighed(solved, name), self._preserved(name, training=training)
                sliced = slices_products(self.config.editor.products, rows.value_diffs)
                solved.solutions[name] = self.shards.solve(name, *rows, damping[name], preserved, sliced=sliced)
            except EditError as error:
                raise EditError(f"layer {name}: {error}") from error
            solved.shifts[name] = solved.solutions[name].shift
        finite(solved.shifts, "check the value gradients and the editor")
        if training and not solved.kept:
            release_freed_memory()  # memory matters more for so many rows than the page faults this costs
        return solved

    @torch.no_grad()
    def layer_targets(self, traces: Traces) -> dict[str, LayerTargets]:
        """The targets of each layer, row by row: all that a set of edits needs of a fact."""
        if self.config.editor.aggregation == "sum":
            parts = list(self._solve_rows(traces, None))
            return {
                name: LayerTargets(
                    torch.cat([part.pseudo_keys for part in parts if part.layer == name]),
                    torch.cat([part.scaled_grads for part in parts if part.layer == name]),
                )
                for name in traces
            }
        solved = Solved(traces, {}, {}, *self._value_diffs(traces, None))
        return {name: self._weighed(solved, name) for name in solved.value_diffs}

    def solve_equations(self, equations: Mapping[str, NormalEquation]) -> dict[str, Tensor]:
        """Shifts from summed equations; a sum of shifts (MEND) is their cross term itself."""
        if self.config.editor.aggregation == "sum":
            return {name: equation.cross.clone() for name, equation in equations.items()}
        damping = self.damping()
        return {
            name: equation.solve(damping[name], self._preserved(name)).shift for name, equation in equations.items()
        }

    def solve_targets(self, targets: Mapping[str, LayerTargets]) -> dict[str, Tensor]:
        """Shifts from the rows themselves, which costs less where they are few."""
        damping = self.damping()
        solutions = {
            name: solve_least_squares(*rows, damping[name], self._preserved(name)) for name, rows in targets.items()
        }
        return {name: solution.shift for name, solution in solutions.items()}

    def backward(self, solved: Solved, shift_grads: Mapping[str, Tensor]) -> None:
        """Stages (v)–(vii): add ∇_θ L_meta, given ∇_W̃ L_meta of each layer, to the gradients of θ. It uses up the
        solutions of `solved`."""
        pullbacks: dict[str, Pullback] = {}
        damping, in_batches = self.damping(), not solved.kept
        if in_batches:
            release_freed_memory()
        for name in list(solved.solutions):
            solution = solved.solutions.pop(name)
            pullbacks[name] = solution.pull_back(shift_grads[name], self._weighed(solved, name).keys)
            if self.shards.leads(name):
                self._scalars_backward(name, solution.shift, pullbacks[name], damping[name])
        for shape in self.groups:
            batches = [solved.kept[shape]] if shape in solved.kept else self._run(shape, solved.traces, grad=True)
            for batch in batches:
                self._proxy_loss(batch, solved, pullbacks, shift_grads).backward()  # type: ignore[no-untyped-call]
        solved.kept.clear()
        if in_batches:
            release_freed_memory()

    def step(self) -> None:
        """Sum the gradients over the shards, clip them, take one Adam step, clear them."""
        self.shards.sum_grads(self.parameters())
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        assert grads, "backward comes before step"
        norm = torch.nn.utils.get_total_norm(grads)
        if not bool(torch.isfinite(norm)):
            gradients = [(name, value.grad) for name, value in self.named_parameters()]
            broken = [name for name, grad in gradients if grad is not None and not grad.isfinite().all()]
            raise EditError(f"the meta-gradient is not finite in {', '.join(broken[:4])}")
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), self.config.training.max_grad_norm, norm)
        self.last_grad_norm = float(norm)
        optimizer = self.optimizer()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * schedule(self.config.training, self.steps_done)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1

    def optimizer(self) -> torch.optim.Adam:
        """Adam over θ."""
        if self._optimizer is None:
            self._optimizer = make_adam(self, self.config.training)
        return self._optimizer

    def optimizer_state(self) -> dict[str, Tensor]:
        """Adam's state as plain tensors, by parameter."""
        return adam_state(self, self.optimizer())

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `optimizer_state` gave."""
        load_adam_state(self, self.optimizer(), tensors)

    # --- the hyper-network in batches ----------------------------------------------------------------

    def _net(self, shape: str) -> HyperNetwork:
        return cast(HyperNetwork, self.nets[shape])

    def _run(self, shape: str, traces: Traces, *, grad: bool) -> Iterator[list[HypernetRows]]:
        """The network over all tokens of its layers, batch by batch."""
        names = [layer.name for layer in self.groups[shape]]
        return run_in_batches(self._net(shape), names, traces, self.config.batch.hypernet_rows, grad=grad)

    def _solve_rows(self, traces: Traces, kept: dict[str, list[HypernetRows]] | None) -> Iterator[HypernetRows]:
        """All rows without a graph, except that a network whose rows fit one batch leaves them in `kept`."""
        for shape, members in self.groups.items():
            num_rows = sum(len(traces[layer.name].keys) for layer in members if layer.name in traces)
            keep = kept is not None and num_rows <= self.config.batch.hypernet_rows
            for batch in self._run(shape, traces, grad=keep):
                if kept is not None and keep:
                    kept[shape] = batch
                yield from batch

    def _value_diffs(
        self, traces: Traces, kept: dict[str, list[HypernetRows]] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """d of each token by layer, and the root of its weight where tokens have weights."""
        dtype = self._net(next(iter(self.groups))).log_damping.dtype
        diffs = {name: torch.empty_like(value_grads, dtype=dtype) for name, (_, value_grads) in traces.items()}
        roots = {name: part.new_empty(len(part)) for name, part in diffs.items()} if self.config.editor.weighing else {}
        for part in self._solve_rows(traces, kept):
            diffs[part.layer][part.rows] = part.value_diffs().detach()
            if part.weight_roots is not None:
                roots[part.layer][part.rows] = part.weight_roots.detach()
        return diffs, roots

    def _weighed(self, solved: Solved, name: str) -> LayerTargets:
        """A layer's rows as the least squares take them: Σ w‖Su − d‖² is the plain sum over √w u and √w d."""
        keys, diffs = solved.traces[name].keys, solved.value_diffs[name]
        if name not in solved.weight_roots:
            return LayerTargets(keys, diffs)
        roots = solved.weight_roots[name][:, None]
        return LayerTargets(keys.to(roots) * roots, diffs * roots)

    def _sum_shifts(self, traces: Traces, kept: dict[str, list[HypernetRows]] | None) -> dict[str, Tensor]:
        """MEND: S* = Σ_j S_j = Σ_j −η ∇̃_v L ũᵀ (appendix A.2)."""
        shifts = {
            layer.name: torch.zeros(
                layer.value_size, layer.key_size, dtype=torch.float64, device=traces[layer.name].keys.device
            )
            for layer in self.layers
            if layer.name in traces
        }
        for part in self._solve_rows(traces, kept):
            shifts[part.layer] += part.scaled_grads.detach().T @ part.pseudo_keys.detach()
        return {name: self.shards.sum_shift(name, shift) for name, shift in shifts.items()}

    def _proxy_loss(
        self,
        batch: list[HypernetRows],
        solved: Solved,
        pullbacks: Mapping[str, Pullback],
        shift_grads: Mapping[str, Tensor],
    ) -> Tensor:
        """L̃: linear in the hyper-network's output, with the meta loss's gradient."""
        losses = []
        for part in batch:
            if self.config.editor.aggregation == "sum":  # Σ_j ⟨∇_S L, S_j⟩
                effect = part.pseudo_keys @ shift_grads[part.layer].to(part.pseudo_keys).T
                losses.append((effect * part.scaled_grads).sum())
            elif part.weight_roots is None:  # Σ_j ⟨∇_{d_j} L, d_j⟩
                diffs_grad = pullbacks[part.layer].rows(solved.traces[part.layer].keys, part.rows)
                losses.append((diffs_grad.to(part.keys) * part.value_diffs()).sum())
            else:
                losses.append(self._weighed_proxy_loss(part, solved, pullbacks[part.layer]))
        return torch.stack(losses).sum()

    def _weighed_proxy_loss(self, part: HypernetRows, solved: Solved, pullback: Pullback) -> Tensor:
        """With s = √w:  ∇_{d_j} L = s_j M(s_j u_j),  dL/ds_j = 2 ⟨M(s_j u_j), d_j − S*u_j⟩.

        The second follows from S* = D'U'ᵀ(U'U'ᵀ + λI + wC)⁻¹ of the rows u' = s u, d' = s d.
        """
        assert part.weight_roots is not None
        pulled = pullback.rows(self._weighed(solved, part.layer).keys, part.rows).to(part.keys)  # M(s u)
        with torch.no_grad():
            missed = part.value_diffs() - part.keys @ solved.shifts[part.layer].to(part.keys).T
            diffs_grad = pulled * part.weight_roots[:, None]
            roots_grad = 2 * (pulled * missed).sum(-1)
        return (diffs_grad * part.value_diffs()).sum() + (roots_grad * part.weight_roots).sum()

    def _scalars_backward(self, name: str, shift: Tensor, pullback: Pullback, damping: float) -> None:
        """Add the gradients of log λ (Theorem 2) and of the weights that are learned."""
        net, index = self._find(name)
        if self.config.editor.regularisation:
            _add_grad(net.log_damping, index, pullback.damping_grad * damping)
        preserved = self._preserved(name, training=True)
        if preserved is not None and self.config.editor.learn_preserved_weight:
            for log_weight, grad in zip(net.log_weights(), pullback.weight_grads(shift, preserved), strict=True):
                if log_weight is not None:
                    _add_grad(log_weight, index, grad)

    def _preserved(self, name: str, *, training: bool = False) -> Preserved | None:
        net, index = self._find(name)
        return net.preserved(index, keep=not training)  # a step of training changes λ and w

    def _find(self, name: str) -> tuple[HyperNetwork, int]:
        for shape, members in self.groups.items():
            for index, layer in enumerate(members):
                if layer.name == name:
                    return self._net(shape), index
        raise AssertionError(f"{name} is none of {[layer.name for layer in self.layers]}")

    def _scalars(self, of: Callable[[HyperNetwork], Tensor]) -> dict[str, float]:
        values = {shape: of(self._net(shape)).detach().double().tolist() for shape in self.groups}
        return {
            layer.name: values[shape][index]
            for shape, members in self.groups.items()
            for index, layer in enumerate(members)
        }


def seeded_editor(layers: Sequence[LayerSpec], config: Config) -> Editor:
    """A fresh editor, drawn from the config's seed: the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Editor(layers, config)


def _add_grad(scalars: nn.Parameter, index: int, grad: Tensor) -> None:
    if scalars.grad is None:
        scalars.grad = torch.zeros_like(scalars)
    scalars.grad[index] += grad.to(scalars)


def finite(shifts: dict[str, Tensor], remedy: str = "the edit has diverged") -> dict[str, Tensor]:
    """The same shifts; EditError if any is not finite, because no later step would notice."""
    broken = [name for name, shift in shifts.items() if not bool(torch.isfinite(shift).all())]
    if broken:
        raise EditError(f"the shift of {', '.join(broken)} is not finite: {remedy}")
    return shifts


def require_facts(facts: Sequence[Fact]) -> None:
    """EditError for an edit of nothing."""
    if not facts:
        raise EditError("no facts to edit were given")
