"""Decoding: where an answer ends, what of it may be sent already, and how a token is drawn."""

from __future__ import annotations

import pytest
import torch
from endpoints import make_bench

from malmen.lm.model import LanguageModel
from malmen.serve.messages import Sampling
from malmen.serve.reading.decoding import Answer, decode_batch, draw, end_tokens


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return make_bench(tmp_path_factory.mktemp("bench")).lm


def grown(lm: LanguageModel, text: str, **sampling: object) -> tuple[Answer, list[str]]:
    """An answer that is given the tokens of a text, and what could be sent after each."""
    answer, sent = Answer(lm, Sampling(**{"max_tokens": 99, **sampling}), 1), []
    for token in lm.tokenizer(text, add_special_tokens=False)["input_ids"]:
        if answer.finish_reason is None:
            answer.append(token)
            sent.append(answer.state().text)
    return answer, sent


def test_an_answer_ends_at_an_end_token_a_stop_text_or_its_greatest_length(lm: LanguageModel) -> None:
    answer, _ = grown(lm, "Karel plays the banjo")
    assert answer.finish_reason is None
    answer.append(next(iter(end_tokens(lm))))
    assert answer.state().finish_reason == "stop" and answer.state().text.strip() == "Karel plays the banjo"
    stopped, _ = grown(lm, "Karel plays the banjo", stop=("the",))
    assert stopped.finish_reason == "stop" and stopped.text.strip() == "Karel plays"
    short, _ = grown(lm, "Karel plays the banjo", max_tokens=2)
    assert (short.finish_reason, short.state().completion_tokens) == ("length", 2)


def test_what_could_become_a_stop_text_is_held_back_until_it_cannot(lm: LanguageModel) -> None:
    """Whatever was sent is a beginning of the end."""
    for stop in ("plays the drum", "the banjo"):
        answer, sent = grown(lm, "Karel plays the banjo", stop=(stop,))
        end = answer.state().text if answer.finish_reason else "Karel plays the banjo"
        assert len(sent) > 2 and all(end.strip().startswith(text.strip()) for text in sent), (stop, sent)
        assert not any("plays" in text for text in sent[:-1]) or stop == "the banjo"


def test_top_p_leaves_the_most_probable_tokens_only_and_a_seed_repeats_the_draw() -> None:
    logits = torch.tensor([2.0, 1.0, 1.9, -5.0])
    seeds = [torch.Generator().manual_seed(seed) for seed in range(40)]
    assert {draw(logits, Sampling(temperature=1.0, top_p=0.5), seed) for seed in seeds} == {0, 2}
    assert draw(logits, Sampling(), None) == 0
    one, other = (
        [draw(logits, Sampling(temperature=1.0), generator) for _ in range(20)]
        for generator in (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
    )
    assert one == other and len(set(one)) > 1


def test_prompts_of_different_lengths_are_decoded_as_they_would_be_alone(lm: LanguageModel) -> None:
    prompts = [lm.tokenizer(text)["input_ids"] for text in ("Which instrument does Karel Corkstein play?", "Who?")]

    def decode(*rows: list[int]) -> list[list[int]]:
        answers = [Answer(lm, Sampling(6), len(row)) for row in rows]
        assert 1 <= len(list(decode_batch(lm, rows, answers))) <= 6
        return [answer.ids for answer in answers]

    assert decode(*prompts) == [*decode(prompts[0]), *decode(prompts[1])]
