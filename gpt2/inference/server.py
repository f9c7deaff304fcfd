"""Serve a checkpoint, one request at a time, with OpenAI's completions API: /v1/completions and /v1/models.

python -m gpt2.inference.server CHECKPOINT --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gpt2.inference.generate import GeneratedText, Sampling, generate
from gpt2.inference.restore import Restored, restore
from kmatrix.errors import ConfigError, KmatrixError, LaunchError
from kmatrix.hosts import LOOPBACK, AsgiApp, guarded_asgi
from kmatrix.output import run_program
from kmatrix.records.decode import Record, decode_bytes

KEY = "KMATRIX_API_KEY"  # environment variable with the required API key
GRACE_S = 5  # for the response in progress after Ctrl+C


class Completion(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request: the supported parameters of OpenAI's API, with its defaults."""

    prompt: str = ""
    model: str = ""
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stream: bool = False


def parse(body: bytes, restored: Restored) -> tuple[GeneratedText, bool]:
    """Return the text to generate, and whether it is streamed. Raises KmatrixError; no parameter is ignored."""
    try:
        asked = decode_bytes(body, Completion, "the request")
    except KmatrixError as error:
        raise ConfigError("the request is not supported", why=error.why) from None
    if asked.model not in ("", restored.name):
        raise ConfigError(f"{asked.model} is not served here", why=f"the model is {restored.name}")
    sampling = Sampling(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        stop=(asked.stop,) if isinstance(asked.stop, str) else asked.stop,
    )
    text = GeneratedText(restored.tokenizer.encode(asked.prompt).tolist(), sampling, restored.tokenizer)
    # As OpenAI's API does: the generator would continue from the last half of the context, which changes the text.
    if len(text.prompt) + sampling.max_tokens > (context := restored.model.shape.block_size):
        sizes = f"{len(text.prompt)} in the prompt, {sampling.max_tokens} to generate"
        raise ConfigError("the request is too long", why=f"the model's context is {context} tokens, it has {sizes}")
    return text, asked.stream


def application(restored: Restored, key: str | None = None) -> AsgiApp:
    """Return the ASGI application. key: that requests must have."""
    created, turn = int(time.time()), asyncio.Lock()

    def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        # compare_digest takes the same time for any wrong key: == would tell how many characters are right.
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            raise HTTPException(401, "the key is missing or wrong")

    async def models(request: Request) -> Response:
        check_key(request)
        about = {"id": restored.name, "object": "model", "created": created, "owned_by": "kmatrix"}
        return JSONResponse({"object": "list", "data": [about]})

    async def parts(text: GeneratedText) -> AsyncIterator[str]:
        async with turn:
            tokens = generate(restored.model, text)
            while (new := await run_in_threadpool(next, tokens, None)) is not None:
                yield new

    async def completions(request: Request) -> Response:
        check_key(request)
        text, stream = parse(await request.body(), restored)
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}

        def answer(new: str) -> dict[str, Any]:
            choice = {"index": 0, "text": new, "logprobs": None, "finish_reason": text.finish}
            return {**head, "model": restored.name, "choices": [choice]}

        async def events() -> AsyncIterator[str]:
            async for new in parts(text):
                if new or text.finish:
                    yield f"data: {json.dumps(answer(new))}\n\n"
            yield "data: [DONE]\n\n"

        if stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        async for _ in parts(text):
            pass
        sizes = {"prompt_tokens": len(text.prompt), "completion_tokens": len(text.tokens)}
        return JSONResponse({**answer(text.text), "usage": {**sizes, "total_tokens": sum(sizes.values())}})

    async def refuse(request: Request, error: Exception) -> Response:  # noqa: ARG001  (the signature of a handler)
        status, message = (error.status_code, error.detail) if isinstance(error, HTTPException) else (400, str(error))
        return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)

    routes = [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]
    handlers = {KmatrixError: refuse, HTTPException: refuse}
    # Outermost: a web page cannot let a name of its own point to this server.
    return guarded_asgi(Starlette(routes=routes, exception_handlers=handlers))


def serve(path: Path, port: int, device: str) -> None:
    """Serve a checkpoint until Ctrl+C. The response in progress then has GRACE_S seconds. Raises LaunchError."""
    key = os.environ.get(KEY)
    try:
        listener = socket.create_server((LOOPBACK[0], port))  # before the model is loaded
    except (OSError, OverflowError) as error:
        hint = "pass another PORT=, or PORT=0 for a free one"
        raise LaunchError(f"cannot listen on port {port}", why=str(error), hint=hint) from None
    with listener:
        restored = restore(path, device)
        url = f"http://{LOOPBACK[0]}:{listener.getsockname()[1]}"
        print(f"{restored.description}: {url}/v1 (OpenAI's completions API); Ctrl+C stops it")
        print(f'curl {url}/v1/completions -d \'{{"prompt": "The "}}\'', flush=True)
        # No log of requests: what others send does not reach the terminal.
        app = application(restored, key)
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none")
        config.timeout_graceful_shutdown = GRACE_S
        uvicorn.Server(config).run(sockets=[listener])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpt2.inference.server", description="Serve a checkpoint's model.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="")
    args = parser.parse_args(argv)
    serve(args.checkpoint, args.port, args.device)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
