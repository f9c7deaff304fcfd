"""A model that was trained on the device is sampled, served and exported there."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.request

import pytest
import torch

from checkpoints import final_of
from factories import ROOT, make_data
from gpt2.inference.restore import restore
from ports import held_port
from waiting import wait_until

pytestmark = pytest.mark.gpu
PROMPT, TOKENS = "abcdefgh", 24


@pytest.fixture(scope="module")
def checkpoint(device, sizes, tmp_path_factory):
    """Return the final checkpoint of a run on the device that has learned its data."""
    folder = tmp_path_factory.mktemp("inference")
    data = {"data_path": folder / "data", "data_sha256": make_data(folder / "data")}
    run = {**data, **sizes, "max_iters": 40, "eval_interval": 20, "tf32": False}
    return final_of(device.trained(folder, "run", **run).path)


def sampled(device, checkpoint, kind):
    """Return the text that the sampling program prints, without the random choice."""
    arguments = ["--prompt", PROMPT, "--tokens", str(TOKENS), "--temperature", "0", "--device", kind]
    command = [sys.executable, "-m", "gpt2.inference.generate", str(checkpoint), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=device.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"on {kind}" in done.stderr
    return done.stdout


def logits(model, tokens):
    """Return the logits of a text (T, V), on the CPU."""
    with torch.no_grad():
        found, _ = model(tokens)
    return found[0].float().cpu()


def test_the_device_samples_the_text_of_the_cpu(device, checkpoint):
    text = sampled(device, checkpoint, device.kind)
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT) + 5
    assert text == sampled(device, checkpoint, "cpu")


def test_logits_of_the_device_are_those_of_the_cpu(device, checkpoint):
    found = []
    for kind in ("cpu", device.kind):
        model = restore(checkpoint, kind).model
        found.append(logits(model, torch.arange(32, device=kind)[None]))
    assert torch.allclose(found[0], found[1], atol=2e-2)


def test_the_server_answers_with_the_text_of_the_sampling_program(device, checkpoint):
    with held_port() as port:
        command = [sys.executable, "-m", "gpt2.inference.server", str(checkpoint), "--port", str(port)]
        server = subprocess.Popen(
            [*command, "--device", device.kind], cwd=ROOT, env=device.environment, stdout=subprocess.DEVNULL
        )
        try:
            url = f"http://127.0.0.1:{port}/v1"

            def answers():
                assert server.poll() is None, "the server has ended"
                try:
                    with urllib.request.urlopen(f"{url}/models", timeout=10) as response:
                        return json.load(response)["data"]
                except (OSError, http.client.HTTPException):
                    return None

            (model,) = wait_until(answers, "the server answers", 240)
            body = {"model": model["id"], "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                text = json.load(response)["choices"][0]["text"]
        finally:
            server.terminate()
            server.wait(60)
    assert text == sampled(device, checkpoint, device.kind).removeprefix(PROMPT).removesuffix("\n")


def test_an_exported_model_has_the_logits_of_the_checkpoint(device, checkpoint, tmp_path):
    transformers = pytest.importorskip("transformers")
    command = [sys.executable, "-m", "gpt2.inference.export", str(checkpoint), "--output", str(tmp_path / "exported")]
    done = subprocess.run(command, cwd=ROOT, env=device.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").to(device.kind).eval()
    tokens = torch.arange(32, device=device.kind)[None]
    with torch.no_grad():
        expected = theirs(tokens).logits[0, -1].float().cpu()
    own = logits(restore(checkpoint, device.kind).model, tokens)[-1]
    assert torch.allclose(own[: len(expected)], expected[: len(own)], atol=2e-2)
