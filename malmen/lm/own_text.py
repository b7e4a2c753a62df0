"""Texts that the unedited model writes itself: what an edit must leave alone wherever it was not asked for.

No corpus is needed, so any model that writes has them. A text that ends at once counts too: that the model says nothing
there is something to keep.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from malmen.config import Config, OwnTextConfig
from malmen.data.near_misses import NearMisses, near_miss_questions
from malmen.data.records import EditRecord, unrelated_to_all
from malmen.data.sampling import OwnText
from malmen.data.tokens import EncodedFact
from malmen.errors import EditError, UsageError
from malmen.lm.generate import OnProgress, continue_rows
from malmen.lm.model import LanguageModel, fact_encoder
from malmen.runs.files import atomic_file

log = logging.getLogger(__name__)

Form = Literal["raw", "chat"]
_ROWS_AT_ONCE = 64  # texts written together; fixed, because the batch decides which tokens are drawn
_OPENINGS_SHARE = 0.25  # of the prompts, at most
_NOTHING_SHARE = 0.03  # of the prompts: the text begins with its first token

Gather = Callable[[dict[int, list[list[int]]]], list[dict[int, list[list[int]]]]]


class Writers(NamedTuple):
    """The processes that share the writing, as one of them sees them: it writes `share` of the batches."""

    share: slice = slice(None)
    gather: Gather = lambda mine: [mine]
    first: bool = True  # whether this is the one that uses the cache


ALONE = Writers()


class Start(NamedTuple):
    """What a text is written after."""

    prompt: str
    ids: tuple[int, ...]  # of the prompt in its form
    form: Form
    sampled: bool  # drawn, or greedy


def find_forms(lm: LanguageModel, config: OwnTextConfig) -> list[Form]:
    """The forms of prompts that this model is asked in."""
    if lm.kind == "classifier":
        raise UsageError("data.unrelated is not `given`, but a classifier writes no texts: use `given`")
    has_template = bool(getattr(lm.tokenizer, "chat_template", None))
    if config.forms == "auto":
        return ["raw", "chat"] if has_template else ["raw"]
    if config.forms == "chat" and not has_template:
        raise UsageError("own_text.forms is `chat`, but this model's tokenizer has no chat template; use `raw`")
    return [config.forms]


def training_starts(lm: LanguageModel, config: Config, records: Iterable[EditRecord]) -> list[Start]:
    """Prompts of unrelated facts, neutral openings and nothing, drawn by the seed, in each form."""
    rng, own = random.Random(f"own text/{config.seed}"), config.own_text
    asked = sorted({fact.prompt for record in records for fact in record.unrelated})
    rng.shuffle(asked)
    neutral = openings()
    number = own.texts if asked else min(own.texts, 2 * len(neutral))
    nothing = max(1, round(_NOTHING_SHARE * number))
    few = neutral[: max(1, round(_OPENINGS_SHARE * number))] if asked else neutral
    prompts = [*few, *asked[: max(0, number - nothing - len(few))]]
    starts = []
    for form in find_forms(lm, own):
        for place, prompt in enumerate(prompts):
            starts.append(Start(prompt, _prompt_ids(lm, config, form, prompt), form, _is_sampled(place, own.sampled)))
        if form == "raw" and (first := _nothing(lm)):  # drawn, since greedy ones are all the same
            starts += [Start("", first, form, True)] * nothing
    return starts


def evaluation_texts(
    lm: LanguageModel, config: Config, records: Sequence[EditRecord], number: int,
    on_progress: OnProgress | None = None,
) -> dict[Form, list[EncodedFact]]:  # fmt: skip
    """By form, greedy texts after the first `number` different prompts of unrelated facts that no record edits."""
    prompts, forms = _evaluation_prompts(records, number), find_forms(lm, config.own_text)
    return texts_after(lm, config, prompts, forms, on_progress)


def texts_after(
    lm: LanguageModel, config: Config, prompts: Sequence[str], forms: Sequence[Form],
    on_progress: OnProgress | None = None,
) -> dict[Form, list[EncodedFact]]:  # fmt: skip
    """By form, a greedy text after each prompt."""
    starts = [Start(prompt, _prompt_ids(lm, config, form, prompt), form, False) for form in forms for prompt in prompts]
    texts = write_texts(lm, starts, config.own_text.max_tokens, config.seed, on_progress=on_progress)
    return {form: texts[place * len(prompts) : (place + 1) * len(prompts)] for place, form in enumerate(forms)}


def _evaluation_prompts(records: Sequence[EditRecord], number: int) -> list[str]:
    asked = dict.fromkeys(fact.prompt for facts in unrelated_to_all(records) for fact in facts)
    return list(asked)[:number] or openings()[:number]


def rewritten_texts(
    lm: LanguageModel, config: Config, records: Sequence[EditRecord], texts: Mapping[Form, Sequence[EncodedFact]],
    rewrite: Callable[[str], str],
) -> dict[Form, list[EncodedFact]]:  # fmt: skip
    """The `evaluation_texts` of these records as they stand behind what is read in place of their prompts."""
    number = max(map(len, texts.values()), default=0)
    return texts_behind(lm, config, _evaluation_prompts(records, number), texts, rewrite)


def texts_behind(
    lm: LanguageModel, config: Config, prompts: Sequence[str], texts: Mapping[Form, Sequence[EncodedFact]],
    rewrite: Callable[[str], str],
) -> dict[Form, list[EncodedFact]]:  # fmt: skip
    """The `texts_after` these prompts, behind what is read in their place."""
    return {
        form: [
            _as_fact(lm, Start(prompt, _prompt_ids(lm, config, form, rewrite(prompt)), form, False), text.targets)
            for prompt, text in zip(prompts, written, strict=True)
        ]
        for form, written in texts.items()
    }


def openings() -> list[str]:
    """Neutral beginnings of texts, from openings.txt."""
    return Path(__file__).parent.parent.joinpath("data", "openings.txt").read_text(encoding="utf-8").splitlines()


def write_texts(
    lm: LanguageModel,
    starts: Sequence[Start],
    tokens: int,
    seed: int,
    *,
    share: slice = slice(None),
    gather: Gather = lambda mine: [mine],
    on_progress: OnProgress | None = None,
) -> list[EncodedFact]:
    """The text after each start as a fact whose answer is what the model wrote, up to its end mark.

    Prompts of similar lengths run together, in batches that do not depend on who writes them. Processes that share the
    work write a `share` of the batches each and `gather` those of all.
    """
    batches = []
    for sampled in (False, True):
        members = [index for index, start in enumerate(starts) if start.sampled == sampled]
        members.sort(key=lambda index: len(starts[index].ids))
        batches += [members[first : first + _ROWS_AT_ONCE] for first in range(0, len(members), _ROWS_AT_ONCE)]
    written: dict[int, list[list[int]]] = {}
    for number in range(len(batches))[share]:
        members = batches[number]
        prompts = [starts[index].ids for index in members]
        with torch.random.fork_rng(devices=[lm.device] if lm.device.type == "cuda" else []):
            torch.manual_seed(seed * 1_000_003 + number)
            written[number] = continue_rows(lm, prompts, tokens, sampled=starts[members[0]].sampled)
        if on_progress:
            on_progress(number + 1, len(batches))
    rows: dict[int, list[int]] = {}
    for part in gather(written):
        for number, answers in part.items():
            rows.update(zip(batches[number], answers, strict=True))
    return [_as_fact(lm, start, rows[index]) for index, start in enumerate(starts)]


def own_texts(
    lm: LanguageModel,
    config: Config,
    records: Iterable[EditRecord],
    writers: Writers = ALONE,
    on_progress: OnProgress | None = None,
) -> list[OwnText]:
    """The texts for training, of this model, config and records: written once, then read from the cache."""
    starts = training_starts(lm, config, records)
    texts = _written_once(lm, config, starts, writers, on_progress)
    return [OwnText(start.prompt, text) for start, text in zip(starts, texts, strict=True)]


def near_misses(
    lm: LanguageModel,
    config: Config,
    records: Iterable[EditRecord],
    writers: Writers = ALONE,
    on_progress: OnProgress | None = None,
) -> NearMisses:
    """Questions of these records with what the model answers greedily, asked in the form of edits; written once too."""
    if lm.kind == "classifier":
        raise UsageError(f"data.near_misses is {config.data.near_misses}, but a classifier writes no texts: use 0")
    questions, form = near_miss_questions(config, records), config.data.prompt_format
    starts = [Start(asked.prompt, _prompt_ids(lm, config, form, asked.prompt), form, False) for asked in questions]
    return NearMisses(list(zip(questions, _written_once(lm, config, starts, writers, on_progress), strict=True)))


def _written_once(
    lm: LanguageModel,
    config: Config,
    starts: Sequence[Start],
    writers: Writers,
    on_progress: OnProgress | None,
) -> list[EncodedFact]:
    """The texts after these starts, from the cache if it has them, else written and put there."""
    own, (share, gather, first) = config.own_text, writers
    about = [lm.fingerprint(), str(lm.dtype), own.max_tokens, config.seed, starts]
    folder = Path(own.folder).expanduser() if own.folder else user_cache() / "own_text"
    file = folder / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"
    known = gather({0: json.loads(file.read_text()) if first and file.is_file() else []})[0][0]
    if known:
        return [_as_fact(lm, start, ids) for start, ids in zip(starts, known, strict=True)]
    log.info("writing %d texts of the unedited model", len(starts))
    texts = write_texts(lm, starts, own.max_tokens, config.seed, share=share, gather=gather, on_progress=on_progress)
    if first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_file(file, json.dumps([fact.targets for fact in texts]))
        except OSError as error:
            raise EditError(f"cannot write to {folder}: {error.strerror}; set own_text.folder") from error
    return texts


def user_cache() -> Path:
    """Where caches of this user go that no run owns."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "malmen"


def _prompt_ids(lm: LanguageModel, config: Config, form: Form, prompt: str) -> tuple[int, ...]:
    encoder = fact_encoder(lm, config.data.model_copy(update={"prompt_format": form, "overlong": "truncate"}))
    return tuple(encoder.generation_ids(prompt, config.own_text.max_tokens))


def _nothing(lm: LanguageModel) -> tuple[int, ...]:
    """The token that texts begin after, where there is one."""
    if lm.kind != "decoder":
        return ()
    first = lm.tokenizer.bos_token_id if lm.tokenizer.bos_token_id is not None else lm.tokenizer.eos_token_id
    return () if first is None else (first,)


def _is_sampled(place: int, share: float) -> bool:
    """Spreads that share evenly over the places."""
    return int((place + 1) * share) > int(place * share)


def _as_fact(lm: LanguageModel, start: Start, ids: Sequence[int]) -> EncodedFact:
    end = lm.tokenizer.eos_token_id
    answer = list(ids[: ids.index(end) + 1] if end in ids else ids)
    if lm.kind == "encoder-decoder":
        return EncodedFact([lm.decoder_start, *answer[:-1]], 0, answer, list(start.ids))
    return EncodedFact([*start.ids, *answer[:-1]], len(start.ids) - 1, answer)
