from __future__ import annotations

from pathlib import Path

import pytest
import torch

from malmen.data.tokens import EncodedFact
from malmen.runs.fact_cache import FactCache


@pytest.fixture(params=["memory", "folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "folder" else None


def test_facts_are_known_by_content(folder: Path | None) -> None:
    cache = FactCache(1000, folder)
    cache.put(EncodedFact([1, 2, 3], 1, [4, 5]), {"keys": torch.ones(3)})
    assert cache.holds(["keys"], EncodedFact([1, 2, 3], 1, [4, 5]))
    for other in (
        EncodedFact([1, 2, 3], 1, [4, 6]),
        EncodedFact([1, 2], 1, [3, 4, 5]),
        EncodedFact([1, 2, 3], 2, [4, 5]),
        EncodedFact([1, 2, 3], 1, [4, 5], [7]),
    ):
        assert not cache.holds(["keys"], other)
    assert not cache.holds(["keys", "grads"], EncodedFact([1, 2, 3], 1, [4, 5]))
    assert not cache.holds([], EncodedFact([1, 2, 3], 1, [4, 5]))  # nothing can be kept of it, so nothing is known


def test_the_budget_holds_in_bytes_and_all_of_a_fact_is_taken_or_nothing(folder: Path | None) -> None:
    cache = FactCache(40, folder)
    one, two = EncodedFact([1], 0, [1]), EncodedFact([2], 0, [2])
    cache.put(one, {"keys": torch.zeros(4)})
    cache.put(two, {"keys": torch.zeros(4), "grads": torch.zeros(4)})
    assert (cache.used_bytes, cache.holds(["keys"], two)) == (16, False)
    cache.put(one, {"keys": torch.zeros(4), "grads": torch.zeros(2)})  # what is there is not counted again
    assert cache.used_bytes == 24


def test_a_view_does_not_keep_its_batch() -> None:
    cache, fact = FactCache(100), EncodedFact([1], 0, [1])
    batch = torch.arange(1000.0)
    cache.put(fact, {"keys": batch[:2]})
    assert cache.get("keys", fact).untyped_storage().nbytes() == 8
    batch[0] = 7
    assert cache.get("keys", fact).tolist() == [0, 1]


def test_a_folder_serves_several_caches_and_their_budget_is_the_folders(tmp_path: Path) -> None:
    one, other = FactCache(40, tmp_path), FactCache(40, tmp_path)
    facts = [EncodedFact([number], 0, [number]) for number in range(3)]
    one.put(facts[0], {"keys": torch.ones(4)})
    other.split(["keys"], facts)  # where it looks what the others have done
    other.put(facts[1], {"keys": torch.ones(4)})
    other.put(facts[2], {"keys": torch.ones(4)})
    known, fresh = FactCache(40, tmp_path).split(["keys"], facts)
    assert ([place for place, _ in known], [place for place, _ in fresh]) == ([0, 1], [2])
