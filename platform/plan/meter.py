"""The memory and the operations of a computation, counted while it runs on torch's meta device: shapes without numbers.

The code that is rehearsed is the code that will run, so the plan cannot drift away from it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

HOARDED = 32 * 2**20  # glibc's largest mmap threshold: freed blocks up to it stay with the process, larger ones do not

_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_IN_PLACE = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}  # products that torch's registry does not know


@dataclass
class Cost:
    """The work of a computation: matrix products by type, and what all other operations read and write."""

    flops: Counter[torch.dtype] = field(default_factory=Counter)  # of matrix products
    touched: float = 0.0  # bytes, by all other operations
    calls: float = 0.0  # operations

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.touched + other.touched, self.calls + other.calls)

    @property
    def total_flops(self) -> int:
        """The sum over all types."""
        return sum(self.flops.values())


class Meter(TorchDispatchMode):
    """Counts, inside, the bytes of new tensors, their peak, and the cost of what runs; `known` tensors are free."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.small = self.small_peak = 0  # the part in blocks that glibc hoards
        self.cost = Cost()
        self.weight = 1.0  # how often what runs now would run
        self._live = WeakIdKeyDictionary()
        self._known = known  # kept alive, so that no other tensor takes a place in `_live`
        for tensor in known:
            self._live[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return _healthy(args[0])
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            if args[0].dtype == torch.bool and kwargs["device"].type == "meta":
                return args[0]  # a mask keeps its numbers: they say how many rows it selects
            if args[0].is_meta and kwargs["device"].type == "cpu":
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        out = func(*args, **kwargs)
        if func is _aten.le.Tensor and out.is_meta and not out.shape:
            return torch.zeros((), dtype=torch.bool)  # pivots above the noise: a healthy factor
        self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = [out] if isinstance(out, Tensor) else [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        flops = _flops(func, args, kwargs, out)
        if flops:
            self.cost.flops[outputs[0].dtype] += round(flops * self.weight)
        elif not func.is_view:  # two read, one written
            self.cost.touched += 3 * self.weight * total_bytes(outputs)
        self.cost.calls += self.weight * (not func.is_view)
        for tensor in outputs:
            self._hold(tensor)

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._live:
            size = self._live[storage] = storage.nbytes()
            small = size if size <= HOARDED else 0
            self._change(size, small)
            weakref.finalize(storage, self._change, -size, -small)

    def _change(self, size: int, small: int) -> None:
        self.held += size
        self.small += small
        self.peak, self.small_peak = max(self.peak, self.held), max(self.small_peak, self.small)

    @contextmanager
    def stage(self, costs: dict[str, Cost], name: str) -> Iterator[None]:
        """What runs inside is added to the cost of a stage."""
        before, self.cost = self.cost, Cost()
        with self, Attention():
            yield
        costs[name] = costs.get(name, Cost()) + self.cost
        self.cost, self.weight = before + self.cost, 1.0


class Attention(TorchFunctionMode):
    """Attention as fused kernels do it, which keep no (token, token) matrix; meta tensors would take the slow way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(*args, **(kwargs or {}))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    out: Tensor = _ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """The sum of their sizes."""
    return sum(tensor.nbytes for tensor in tensors)


def _healthy(scalar: Tensor) -> bool | int | float:
    """What a successful run reads: all numbers are finite, nothing has failed."""
    if scalar.dtype == torch.bool:
        return True
    return 1.0 if scalar.dtype.is_floating_point else 0


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> float:
    packet = func.overloadpacket
    packet = _IN_PLACE.get(packet, packet)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is _aten.linalg_cholesky_ex:
        return float(args[0].shape[-1] ** 3 / 3)
    if packet is _aten.cholesky_solve:
        return float(2 * args[1].shape[-1] ** 2 * args[0].shape[-1])
    if packet is _aten.linalg_solve_triangular:
        return float(args[1].numel() * args[0].shape[-1])
    if packet in (_ATTENTION, _ATTENTION_BACKWARD):
        query, key = args[0:2] if packet is _ATTENTION else args[1:3]
        return float((4 if packet is _ATTENTION else 10) * query.numel() * key.shape[-2])
    return 0.0
