"""OpenAI's requests and responses, as far as they apply to one model with many versions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from malmen.serve.http.schemas import Name, PromptText, plain_text
from malmen.serve.messages import AnswerState, Sampling

Stop = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(plain_text)]


class _CompletionBase(BaseModel):
    """What both kinds of completion share; members that clients send and that change nothing here are ignored."""

    model_config = ConfigDict(frozen=True)

    model: Name = Field(default="live", description="an alias (`live`, `base`, …) or a version's id")
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float = Field(
        default=0.0, ge=0, le=2, allow_inf_nan=False, description="0, the default here: the most probable token"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    stop: Stop | list[Stop] | None = Field(default=None)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stream: bool = False
    n: Literal[1] = 1
    min_version: Name | None = Field(default=None, description="only by this version or one built on it; else 409")

    def sampling(self, limit: int, default: int = 16) -> Sampling:
        """How the answer is drawn, within the endpoint's limit of new tokens."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        tokens = min(self.max_tokens or default, limit)
        return Sampling(tokens, self.temperature, self.top_p, stop[:4], self.seed)


class CompletionIn(_CompletionBase):
    """The body of `POST /v1/completions`."""

    prompt: PromptText | Annotated[list[PromptText], Field(min_length=1, max_length=64)] = Field(
        examples=["Which instrument does Karel Corkstein play?"]
    )

    def prompts(self) -> list[str]:
        """All prompts."""
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)


class Part(BaseModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(frozen=True)
    type: Literal["text"]
    text: PromptText


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(frozen=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: PromptText | Annotated[list[Part], Field(min_length=1)]

    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatIn(_CompletionBase):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(
        min_length=1,
        max_length=100,
        examples=[[{"role": "user", "content": "Which instrument does Karel Corkstein play?"}]],
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)

    def sampling(self, limit: int, default: int = 64) -> Sampling:
        """How the answer is drawn; `max_completion_tokens`, OpenAI's newer name, has precedence."""
        newer = self.model_copy(update={"max_tokens": self.max_completion_tokens or self.max_tokens})
        return super(ChatIn, newer).sampling(limit, default)


def completion(answers: Sequence[AnswerState], version: str) -> dict[str, Any]:
    """A finished completion."""
    choices = [
        {"index": index, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}
        for index, answer in enumerate(answers)
    ]
    return {**_head("cmpl", "text_completion", version), "choices": choices, "usage": _usage(answers)}


def chat_completion(answer: AnswerState, version: str) -> dict[str, Any]:
    """A finished chat completion."""
    message = {"role": "assistant", "content": answer.text.strip()}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    return {**_head("chatcmpl", "chat.completion", version), "choices": [choice], "usage": _usage([answer])}


class Chunks:
    """The chunks of a streamed completion, which share one id."""

    def __init__(self, chat: bool, version: str) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        self.chat, self.head = chat, _head("chatcmpl" if chat else "cmpl", kind, version)

    def piece(self, text: str, finish_reason: str | None, index: int = 0) -> dict[str, Any]:
        """The next part of the text, or the end."""
        inner = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": index, **inner, "logprobs": None, "finish_reason": finish_reason}
        return {**self.head, "choices": [choice]}


def _head(prefix: str, kind: str, version: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": version}


def _usage(answers: Sequence[AnswerState]) -> dict[str, int]:
    prompt = sum(answer.prompt_tokens for answer in answers)
    new = sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
