from __future__ import annotations

import pytest

from malmen.lm.cards import CARDS, find_card


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("a100-40", "A100-40"),
    ],
)
def test_a_card_is_known_by_the_name_that_torch_gives_it(name: str, card: str) -> None:
    found = find_card(name)
    assert found is not None and found.name == card


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "A100",
        "",
    ],
)
def test_what_is_not_in_the_table_is_not_taken_for_a_neighbour(name: str) -> None:
    assert find_card(name) is None


def test_every_card_is_found_by_its_own_name() -> None:
    assert [find_card(card.name) for card in CARDS] == list(CARDS)


def test_only_cards_for_computing_are_fast_in_float64() -> None:
    fast = {card.name for card in CARDS if not card.slow_float64}
    assert fast == {"V100-16", "V100-32", "A100-40", "A100-80", "H100", "H100-PCIE", "H200"}
