"""What GPUs can do, by name: memory, and the rates of their data sheets. It needs nothing but the name."""

from __future__ import annotations

import re
from dataclasses import dataclass

_VARIANTS = {
    "laptop",
    "mobile",
    "max",
    "mig",
    "nvl",
    "ti",
    "super",
    "d",
}  # other chips, or parts of one, under the same name
_SLOW = 1 / 16  # float64's share of float32's rate, below which float64 products are worth avoiding


@dataclass(frozen=True)
class Card:
    """One kind of GPU. Rates are those of large dense matrix products, tensor cores included."""

    name: str
    memory: float  # GB of 2³⁰ bytes that a process can use, ECC taken off
    float64: float  # TFLOP/s
    float32: float  # the same without TF32
    tf32: float  # 0: it has none
    bfloat16: float  # 0: it has none
    bandwidth: float  # GB/s of its memory

    @property
    def slow_float64(self) -> bool:
        """Whether float64 is below a sixteenth of float32: 1/32 or 1/64 on cards that are not made for computing."""
        return self.float64 < self.float32 * _SLOW


# From NVIDIA's data sheets; none was measured. Sparse rates, which some sheets print, are halved.
CARDS = (
    Card("V100-16", 15.7, 7.8, 15.7, 0, 0, 900),
    Card("V100-32", 31.7, 7.8, 15.7, 0, 0, 900),
    Card("T4", 14.6, 0.25, 8.1, 0, 0, 320),
    Card("RTX-3090", 23.6, 0.56, 35.6, 35.6, 71, 936),
    Card("RTX-4090", 23.6, 1.29, 82.6, 82.6, 165, 1008),
    Card("RTX-A6000", 47.4, 0.60, 38.7, 77.4, 155, 768),
    Card("A10", 22.0, 0.49, 31.2, 62.5, 125, 600),
    Card("A10G", 22.0, 0.49, 31.5, 35, 70, 600),
    Card("L4", 22.0, 0.47, 30.3, 60, 121, 300),
    Card("L40S", 44.4, 1.43, 91.6, 183, 362, 864),
    Card("A100-40", 39.4, 19.5, 19.5, 156, 312, 1555),
    Card("A100-80", 79.1, 19.5, 19.5, 156, 312, 2039),
    Card("H100", 79.1, 67, 67, 494, 989, 3350),
    Card("H100-PCIE", 79.1, 51, 51, 378, 756, 2000),
    Card("H200", 139.8, 67, 67, 494, 989, 4800),
)


def find_card(name: str) -> Card | None:
    """The card of a name, as torch.cuda.get_device_name gives it or as the table does; None if it is not there."""
    words = _words(name)
    if words & _VARIANTS:
        return None
    return max((card for card in CARDS if _words(card.name) <= words), key=lambda card: len(card.name), default=None)


def _words(name: str) -> set[str]:
    """`NVIDIA A100-SXM4-80GB` is nvidia, a100, sxm4, 80."""
    return {re.sub(r"^(\d+)gb$", r"\1", word) for word in re.split(r"[^a-z0-9]+", name.lower()) if word}
