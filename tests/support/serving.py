"""Serve a small model with the real server in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from gpt2.data.tokenizer import load
from gpt2.inference.restore import Restored
from gpt2.inference.server import Service, application, listening
from gpt2.model.gpt2 import GPT
from kmatrix.shapes import ModelShape
from waiting import wait_until

SHAPE = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=96, vocab_size=257)


def restored(seed: int = 1, model: GPT | None = None) -> Restored:
    """Return a model with random, untrained weights."""
    return Restored(
        model=(model or GPT(SHAPE, seed=seed)).eval(),
        tokenizer=load("byte"),
        path=Path("gpt2_adamw_1cpu/checkpoints/step_00000007.pt"),
        run_id="0123456789",
        step=12,
    )


@contextmanager
def served(service: Service, **options: object) -> Iterator[str]:
    """Serve until the end of the block and yield the URL."""
    listening_socket = listening("127.0.0.1", 0)
    config = uvicorn.Config(
        application(service, **options),  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        ws="none",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening_socket]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server has started")
    try:
        yield f"http://127.0.0.1:{listening_socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
