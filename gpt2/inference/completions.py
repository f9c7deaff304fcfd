"""The completions of OpenAI's API as values: parse and check requests, build responses."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt2.data.tokenizer import END, Tokenizer
from gpt2.generate import REPLACEMENT, GeneratedText, Sampling, TokenScore
from kmatrix.errors import KmatrixError

MAX_TEXTS = 16  # per request: prompts x n
MAX_STOPS, MAX_STOP_LENGTH = 4, 256  # 4 as in OpenAI's API; characters that may be held back before they are sent
DEFAULT_TOKENS = 16  # as in OpenAI's API
MAX_LOGPROBS = 5  # most probable tokens per token, as in OpenAI's API

# Parameters that are not implemented, with the values that have no effect: all other values are rejected.
NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}

KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stream", "stream_options", "stop"),
    *("seed", "echo", "logprobs", "user", *NO_EFFECT),
}


class RefusedError(Exception):
    """A rejected request."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self) -> dict[str, Any]:
        """Return the response body in the format of OpenAI's API."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A parsed request.

    Text number i belongs to prompt i // n, and its seed is the request's seed + i.
    """

    prompts: tuple[tuple[int, ...], ...]  # as tokens
    words: tuple[str, ...]  # the prompts as text, for `echo`
    sampling: Sampling
    n: int  # texts per prompt
    stream: bool
    usage: bool
    echo: bool  # return the prompt before the text

    def echoed(self, number: int) -> str:
        """Return the prompt that is returned before text `number`, "" without `echo`."""
        return self.words[number // self.n] if self.echo else ""

    def texts(self, tokenizer: Tokenizer) -> list[GeneratedText]:
        """Return the texts to generate, in order of their numbers."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        return [
            GeneratedText(prompt, replace(self.sampling, seed=(self.sampling.seed + number) % 2**63), tokenizer)
            for number, prompt in enumerate(prompts)
        ]


def parse(body: bytes, *, model: str, tokenizer: Tokenizer, block_size: int, vocab_size: int) -> CompletionRequest:
    """Parse a request body. Raises RefusedError; unknown and unsupported parameters are never ignored."""
    # Model, prompts and number of texts
    values = _object(body)
    if values.get("model", model) != model:  # clients send the name of another server's model by mistake
        raise RefusedError(
            f"the model {values['model']!r} is not served here; the model is {model}",
            status=404,
            param="model",
            code="model_not_found",
        )
    words, prompts = _prompts(values.get("prompt", ""), tokenizer, vocab_size)
    n = _integer(values, "n", 1, least=1)
    if len(prompts) * n > MAX_TEXTS:
        raise RefusedError(f"{len(prompts) * n} texts (prompts x n), at most {MAX_TEXTS} are allowed", param="n")
    # Refuse what outgrows the context, as OpenAI's API does: the generator would shift it, and change the text
    sampling = _sampling(values)
    longest = max(1, *map(len, prompts))  # 1: an empty prompt becomes the end-of-document token
    if longest + sampling.max_tokens > block_size:
        raise RefusedError(
            f"the model's context is {block_size} tokens, but the request needs {longest + sampling.max_tokens} "
            f"({longest} in the prompt, {sampling.max_tokens} to generate)",
            param="prompt",
            code="context_length_exceeded",
        )
    return CompletionRequest(
        prompts=prompts,
        words=words,
        sampling=sampling,
        n=n,
        stream=_flag(values, "stream"),
        usage=_flag(values.get("stream_options") or {}, "include_usage"),
        echo=_flag(values, "echo"),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:  # a body of 100,000 brackets is deeper than Python's stack
        raise RefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RefusedError("the body is not a JSON object")
    for name, value in values.items():
        if name not in KNOWN:
            raise RefusedError(f"unknown parameter {name}", param=name, code="unknown_parameter")
        if name in NO_EFFECT and value not in NO_EFFECT[name]:
            raise RefusedError(f"{name} is not supported", param=name, code="unsupported_parameter")
    options = values.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RefusedError("stream_options must be an object", param="stream_options")
    return values


def _prompts(value: Any, tokenizer: Tokenizer, size: int) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return the prompts as text and as tokens. value: a text, tokens, or a list of either."""
    several = value if isinstance(value, list) and value and not _is_tokens(value) else [value]
    words, prompts = [], []
    for prompt in several:
        if isinstance(prompt, str):
            words.append(prompt)
            try:
                prompts.append(tuple(tokenizer.encode(prompt).tolist()))
            except (KmatrixError, UnicodeError) as error:
                what = error.what if isinstance(error, KmatrixError) else "the prompt is not text"
                raise RefusedError(what, param="prompt") from None
        elif _is_tokens(prompt):
            if not all(0 <= token < size for token in prompt):
                raise RefusedError(f"a token is outside the vocabulary of {size}", param="prompt")
            prompts.append(tuple(prompt))
            words.append(tokenizer.decode(prompt))
        else:
            raise RefusedError("prompt must be a text, a list of tokens, or a list of either", param="prompt")
    return tuple(words), tuple(prompts)


def _is_tokens(value: Any) -> bool:
    # type, not isinstance, here and below: true is an int in Python, and would be token 1.
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _sampling(values: Mapping[str, Any]) -> Sampling:
    seed = values.get("seed")
    try:
        return Sampling(
            # Without a new token only an echoed prompt is an answer, as in OpenAI's API.
            max_tokens=_integer(values, "max_tokens", DEFAULT_TOKENS, least=0 if _flag(values, "echo") else 1),
            temperature=_number(values, "temperature", 1.0),
            top_p=_number(values, "top_p", 1.0),
            top_k=_integer(values, "top_k", 0, least=0),
            seed=secrets.randbits(63) if seed is None else _integer(values, "seed", 0, least=0),
            stop=_stops(values.get("stop")),
            logprobs=_logprobs(values),
            prompt_logprobs=_logprobs(values) is not None and _flag(values, "echo"),
        )
    except KmatrixError as error:
        raise RefusedError(f"{error.what}: {error.why}", param=error.what.partition(" ")[0]) from None


def _logprobs(values: Mapping[str, Any]) -> int | None:
    if values.get("logprobs") is None:
        return None
    count = _integer(values, "logprobs", 0, least=0)
    if count > MAX_LOGPROBS:
        raise RefusedError(f"logprobs is {count}, at most {MAX_LOGPROBS} are allowed", param="logprobs")
    return count


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    good = isinstance(stops, list) and all(isinstance(stop, str) and len(stop) <= MAX_STOP_LENGTH for stop in stops)
    if not good or len(stops) > MAX_STOPS:
        raise RefusedError(
            f"stop must be a text, or up to {MAX_STOPS} texts, of at most {MAX_STOP_LENGTH} characters", param="stop"
        )
    return tuple(stops)


def _integer(values: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    value = values.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise RefusedError(f"{name} is {value!r}: expected an integer of at least {least}", param=name)
    return value


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise RefusedError(f"{name} is {value!r}: expected a number", param=name)
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise RefusedError(f"{name} is out of range", param=name) from None


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value not in (None, True, False) or type(value) is int:
        raise RefusedError(f"{name} is {value!r}: expected true or false", param=name)
    return bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The fields that all chunks of a response share."""

    id: str
    model: str
    created: int  # Unix seconds

    @classmethod
    def new(cls, model: str) -> Completion:
        return cls(id=f"cmpl-{secrets.token_hex(12)}", model=model, created=int(time.time()))

    def part(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a response, or a chunk of a streamed one."""
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": list(choices), **more}


def choice(number: int, text: str, finish: str | None, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return one text of a response, or its new part."""
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}


def logprobs_of(text: GeneratedText, scores: Sequence[TokenScore], shift: int = 0) -> dict[str, Any] | None:
    """Return scores in the format of OpenAI's API; None if they were not asked for. shift: added to the offsets."""
    if text.sampling.logprobs is None:
        return None

    def top(score: TokenScore) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        return {name_of(token, text.tokenizer): logprob for token, logprob in score.top.items()}

    return {
        "tokens": [name_of(score.token, text.tokenizer) for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [top(score) for score in scores] if text.sampling.logprobs else None,
        "text_offset": [score.offset + shift for score in scores],
    }


def name_of(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token; token_id:<number> for a part of a character, and a name for the end of a document."""
    if token == tokenizer.end_of_document:
        return END
    text = tokenizer.decode([token])
    return f"token_id:{token}" if REPLACEMENT in text else text


def usage(texts: Sequence[GeneratedText], n: int) -> dict[str, int]:
    """Return the numbers of prompt and generated tokens. A prompt counts once for its n texts."""
    read = sum(len(text.prompt) for text in texts[::n])
    written = sum(len(text.tokens) for text in texts)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
