"""The endpoint on Ray Serve, killed in every part at random moments of a stream of edits."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from endpoint_process import EndpointProcess
from endpoints import save_editor, world_facts

from malmen.data.records import Fact
from malmen.serve.ledger.view import LedgerView

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]
FACTS = world_facts(700)
LOOSE = ("guard.min_success=0", "guard.max_shift_ratio=1000", "guard.max_perplexity_ratio=1000", "writer.cpus=0.1",
         "reader.cpus=0.1", "reader.min_replicas=2", "limits.requests_per_minute=100000")  # fmt: skip
ALL = "all of Ray"
PARTS = ("ServeReplica:malmen:WriterDeployment", "ServeReplica:malmen:ReaderDeployment", "ServeReplica:malmen:Ingress")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    folder = tmp_path_factory.mktemp("endpoint")
    process = EndpointProcess(save_editor(folder / "run"), folder, *LOOSE)
    process.start()
    yield process
    process.kill_all()


def test_edits_of_many_clients_are_served_to_each_at_once(endpoint: EndpointProcess) -> None:
    """Read-your-writes: who got a version is served it or a newer one, whichever replica answers."""
    broken: list[str] = []

    def work(number: int) -> None:
        with endpoint.client("edit") as client:
            fact = FACTS[number]
            made = client.post("/v1/edits", json={"facts": [{"prompt": fact.prompt, "answer": fact.answer}]})
            asked = {"model": "live", "prompt": fact.prompt, "max_tokens": 8, "min_version": made.json()["version"]}
            answer = client.post("/v1/completions", json=asked)
            if made.status_code != 201 or answer.status_code != 200:
                broken.append(made.text + answer.text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert broken == []
    with endpoint.client() as client:
        status = client.get("/v1/status").json()
        assert status["live"]["num_facts"] == 16 and status["writer"]["alive"]
        assert status["live"]["number"] <= 16  # requests that came together share a version
        assert client.get("/v1/audit?verify=true").json()["intact"]


def test_an_answer_is_streamed(endpoint: EndpointProcess) -> None:
    asked = {"model": "base", "messages": [{"role": "user", "content": FACTS[0].prompt}], "stream": True}
    with endpoint.client("read") as client, client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 2


@pytest.mark.chaos
def test_after_twenty_kills_every_acknowledged_edit_is_there_and_none_is_half_there(endpoint: EndpointProcess) -> None:
    """Each round kills the writer, a reader and the ingress, or all of Ray, amid edits; then edits go on."""
    draw, kills = random.Random(11), 0
    with endpoint.client() as client:
        held = client.get("/v1/status").json()["live"]["num_facts"]
    with EditStream(endpoint, FACTS[16:]) as stream:
        stream.wait_for_new_edit()
        for number in range(8):
            victims = draw.sample(PARTS, len(PARTS)) if number % 4 != 3 else [ALL]
            for victim in victims:
                stream.stop.wait(draw.uniform(0.0, 0.6))
                kills += kill(endpoint, victim)
            stream.wait_for_new_edit()
    assert kills >= 20
    endpoint.wait_until_ready(120)
    check_ledger(endpoint, stream)
    check_that_asking_again_does_nothing_twice(endpoint, stream, held)
    check_that_readers_agree(endpoint)


def kill(endpoint: EndpointProcess, victim: str) -> int:
    """SIGKILL; 1, as soon as there was somebody to kill."""
    if victim == ALL:
        endpoint.kill_all()
        endpoint.start()
        return 1
    ends = time.monotonic() + 60
    while not endpoint.kill_role(victim):
        assert time.monotonic() < ends, f"no {victim} within a minute"
        time.sleep(0.05)  # between two looks; the wait is bounded above
    return 1


class EditStream:
    """Three clients that send one new fact after the other, each with its own key, whatever becomes of it."""

    def __init__(self, endpoint: EndpointProcess, facts: list[Fact]) -> None:
        self.endpoint, self._facts = endpoint, iter(facts)
        self.sent: dict[str, Fact] = {}  # by key
        self.acknowledged: dict[str, float] = {}  # key -> when it was sent
        self.stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._write) for _ in range(3)]

    def __enter__(self) -> EditStream:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(120)

    def wait_for_new_edit(self) -> None:
        """Until an edit that is sent from now on is acknowledged."""
        begun = time.monotonic()
        while not any(sent > begun for sent in list(self.acknowledged.values())):
            assert time.monotonic() < begun + 120, f"no edit for two minutes\n{self.endpoint.said()}"
            time.sleep(0.05)  # between two looks; the wait is bounded above

    def _write(self) -> None:
        fact: Fact | None = None
        with self.endpoint.client("edit") as client:
            while not self.stop.is_set():
                key = uuid.uuid4().hex
                with self._lock:
                    fact = fact or next(self._facts)
                    self.sent[key] = fact
                begun = time.monotonic()
                try:
                    if post(client, fact, key).status_code in (200, 201):
                        self.acknowledged[key] = begun
                    fact = None
                except httpx.ConnectError:  # it was never sent: while Ray starts again, no facts are used up
                    with self._lock:
                        del self.sent[key]
                except httpx.HTTPError:
                    fact = None
                self.stop.wait(0.3)


def post(client: httpx.Client, fact: Fact, key: str) -> httpx.Response:
    body = {"facts": [{"prompt": fact.prompt, "answer": fact.answer}]}
    return client.post("/v1/edits", json=body, headers={"Idempotency-Key": key})


def check_ledger(endpoint: EndpointProcess, stream: EditStream) -> None:
    """What was acknowledged is there once; what was not is there whole or not at all; the versions are one chain."""
    acknowledged = {stream.sent[key].prompt for key in stream.acknowledged}
    assert len(acknowledged) > 20
    ledger = LedgerView(f"sqlite:///{endpoint.store / 'ledger.db'}")
    assert ledger.verify()["intact"]
    live = ledger.resolve("live")
    edits = ledger.edits_by_id(sorted(ledger.members(live.id)))
    prompts = [edit.prompt for edit in edits]
    assert len(set(prompts)) == len(prompts) == live.num_facts
    earlier = {fact.prompt for fact in FACTS[:16]}
    assert acknowledged <= set(prompts) - earlier <= {fact.prompt for fact in stream.sent.values()}
    chain = ledger.versions(10_000)[::-1]
    assert [version.parent for version in chain] == [None, *(version.id for version in chain[:-1])]
    for edit in edits:
        assert (endpoint.store / "blobs" / f"{edit.rows}.safetensors").exists()
    ledger.close()


def check_that_asking_again_does_nothing_twice(endpoint: EndpointProcess, stream: EditStream, held: int) -> None:
    with endpoint.client("edit") as client:
        for key, fact in stream.sent.items():
            again = post(client, fact, key)
            assert again.status_code in (200, 201), again.text
        assert client.get("/v1/status").json()["live"]["num_facts"] == held + len(stream.sent)


def check_that_readers_agree(endpoint: EndpointProcess) -> None:
    """Both readers answer, and give the same texts for the same version."""
    with endpoint.client() as client:
        ends = time.monotonic() + 60
        while client.get("/v1/status").json()["readers"]["running"] < 2:
            assert time.monotonic() < ends, "the second reader did not come back within a minute"
            time.sleep(0.2)  # between two looks; the wait is bounded above
        versions = ["base", *(one["id"] for one in client.get("/v1/versions", params={"limit": 3}).json()["versions"])]

        def ask(version: str) -> tuple[str, str, str]:
            asked = {"model": version, "prompt": FACTS[0].prompt, "max_tokens": 8}
            reply = client.post("/v1/completions", json=asked)
            return version, reply.json()["choices"][0]["text"], reply.headers["x-malmen-reader"]

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, versions * 8))
    assert len({(version, text) for version, text, _ in answers}) == len(versions)
    assert len({reader for *_, reader in answers}) == 2
