from __future__ import annotations

import torch

from malmen.cache import FactCache
from malmen.data.tokens import EncodedFact


def test_facts_are_known_by_content() -> None:
    cache = FactCache(1000)
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


def test_the_budget_holds_in_bytes_and_all_of_a_fact_is_taken_or_nothing() -> None:
    cache = FactCache(40)
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
