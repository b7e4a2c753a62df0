"""The reader's process: every request is answered by a value, and each answer of a batch ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from endpoints import world_facts
from one_process import Endpoint

from malmen.data.records import EditRecord
from malmen.serve.messages import AnswerState, CountVersions, Evaluate, Prompt, Sampling, Scores
from malmen.serve.problems import Problem
from malmen.serve.reading.reader import ReaderWorker

PROMPT = world_facts(1)[0].prompt


def test_a_streamed_answer_grows_to_the_finished_one(shared: Endpoint) -> None:
    worker, prompt = shared.workers.worker, Prompt(PROMPT, None, Sampling(6))

    async def both() -> tuple[list[AnswerState | Problem], AnswerState | Problem]:
        return [state async for state in worker.stream(prompt)], await worker.ask(prompt)

    states, finished = asyncio.run(both())
    assert isinstance(finished, AnswerState) and finished.text
    assert states[-1] == finished and len(states) > 1
    texts = [state.text for state in states if isinstance(state, AnswerState)]
    assert len(texts) == len(states) and all(finished.text.startswith(text) for text in texts)
    assert [state.finish_reason is None for state in states] == [True] * (len(states) - 1) + [False]


def test_an_answer_that_has_ended_does_not_wait_for_the_others_of_its_batch(shared: Endpoint) -> None:
    reader = shared.workers.reader
    prompts = [Prompt(PROMPT, None, Sampling(tokens, temperature=2.0, seed=1)) for tokens in (1, 6)]
    steps = 0

    async def decode(prompt: Prompt) -> AsyncIterator[AnswerState]:
        nonlocal steps
        async for states in worker.decode_batch(prompts):
            steps += 1
            yield states[prompts.index(prompt)]

    worker = ReaderWorker(reader, decode)
    state = asyncio.run(worker.ask(prompts[0]))
    assert isinstance(state, AnswerState) and state.finish_reason and steps == 1


def test_evaluations_that_wait_for_the_model_do_not_stop_the_batch_that_they_wait_for(shared: Endpoint) -> None:
    worker = shared.workers.worker
    record = EditRecord(world_facts(1)[0])
    answers: list[AnswerState] = []

    async def meet() -> list[object]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        evaluations: list[asyncio.Task[object]] = []
        async for states in worker.decode_batch([Prompt(PROMPT, None, Sampling(3))]):
            answers.extend(states)
            if not evaluations:  # the batch has the model now, and one of these takes the only thread of the pool
                evaluations = [asyncio.create_task(worker.ask(Evaluate([record], None, False))) for _ in range(2)]
                await asyncio.sleep(0)
        return list(await asyncio.gather(*evaluations))

    scores = asyncio.run(asyncio.wait_for(meet(), 60))
    assert answers[-1].finish_reason and all(isinstance(score, Scores) for score in scores)


def test_what_is_wrong_is_a_value_in_a_stream_as_in_a_reply(shared: Endpoint) -> None:
    worker, prompt = shared.workers.worker, Prompt("word " * 90, None, Sampling(1))

    async def both() -> tuple[list[AnswerState | Problem], AnswerState | Problem]:
        return [state async for state in worker.stream(prompt)], await worker.ask(prompt)

    (problem,), refused = asyncio.run(both())
    assert isinstance(problem, Problem) and isinstance(refused, Problem)
    assert problem.status == refused.status == 422 and problem.detail == refused.detail
    missing = asyncio.run(worker.ask(Prompt("a", "ab" * 32, Sampling(1))))  # a version whose file is gone
    assert isinstance(missing, Problem) and missing.status == 503
    assert isinstance(asyncio.run(worker.ask(CountVersions())), int)
