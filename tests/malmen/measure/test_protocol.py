"""How numbers were obtained, stated beside them."""

from __future__ import annotations

import json

from malmen.measure.protocol import FORMS, SCORERS, Protocol, as_records, success_protocols
from malmen.metrics import FOLLOWING, METRICS


def test_every_way_of_counting_a_metric_has_its_own_protocol() -> None:
    protocols = success_protocols("raw")
    assert set(protocols) == {metric.name + way for metric in (*METRICS, *FOLLOWING) for way in SCORERS}
    of_edits = [protocol for name, protocol in protocols.items() if name.startswith("edit_success")]
    assert len({(protocol.decoding, protocol.scorer) for protocol in of_edits}) == len(SCORERS)


def test_the_form_of_the_prompts_is_part_of_a_protocol() -> None:
    raw, chat = success_protocols("raw")["edit_success"], success_protocols("chat")["edit_success"]
    assert (raw.prompt, chat.prompt) == (FORMS["raw"], FORMS["chat"]) and raw != chat


def test_a_record_for_json_leaves_out_what_does_not_apply() -> None:
    protocols = {"a": Protocol("p", "d", "s"), "b": Protocol("p", "d", "s", 3)}
    expected = {"prompt": "p", "decoding": "d", "scorer": "s"}
    assert json.loads(json.dumps(as_records(protocols))) == {"a": expected, "b": {**expected, "questions": 3}}
    assert str(protocols["b"]) == "p (3 questions); d; s"
