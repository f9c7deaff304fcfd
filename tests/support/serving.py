"""Serve a small model with the real server in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from gpt2.data.tokenizer import load
from gpt2.inference.restore import Restored
from gpt2.inference.server import application, listening
from gpt2.model.gpt2 import GPT
from kmatrix.shapes import ModelShape
from waiting import wait_until

SHAPE = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=96, vocab_size=257)


def restored(model: GPT) -> Restored:
    """Return a model as `restore` does."""
    return Restored(model=model.eval(), tokenizer=load("byte"), name="gpt2_adamw_1cpu", step=12)


@contextmanager
def served(model: GPT, key: str | None = None) -> Iterator[str]:
    """Serve until the end of the block and yield the URL."""
    listener = listening("127.0.0.1", 0)
    config = uvicorn.Config(application(restored(model), key=key), log_level="warning", access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server has started")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
