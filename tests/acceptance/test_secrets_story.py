"""No key reaches the results: neither those in uncommitted changes, nor those that the trainer prints."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest

from key_forms import KEY_FORMS, planted
from story import kill, load_json, matrices, only, processes_below
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(600)]

TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *(
        "GLOBAL_BATCH=4",
        "EVAL_SAMPLES=8",
        "EVAL_INTERVAL=20",
        "LOG_INTERVAL=1",
        "REUSE=n",
        "OPTIMIZER=adamw",
        "NUM_GPUS=1",
    ),
)
# Values without a form of their own: only the environment and .netrc tell that they are keys.
KEYS = {
    "WANDB_API_KEY": "c0ffee" * 6 + "beef",
    "MY_SERVICE_TOKEN": "correct-horse-battery-staple",
    "PGPASSWORD": "elephants in the garden",
    "DB_PASSWORD": "correcthorsebatterystaple",  # letters only, as in the name of a status
}
IN_NETRC = "a-password-of-netrc-4711"
IN_TORCH = "hf_" + "Pl4nted" * 6
SHORTEST_PART = 6  # bytes of base64; fewer are in compressed files by chance
PEM_BODY = "MHcCAQEEIPl4nt3dKeyAbCdEfGhIjKlMnOpQrStUvWxYz0123456789abcdefghij"
TALKS = '''
"""A trainer prints every key that it knows, in all ways; seed 2 fails with them, and seed 3 hangs after that."""
import base64, json, os, subprocess, sys, time
words = sys.orig_argv
if "gpt2.train" in words and "torch.distributed.run" not in words:
    with open(words[words.index("gpt2.train") + 1] + "/run.json") as file:
        seed = json.load(file)["train"]["seed"]
    body = "PEM_BODY"
    netrc = open(os.environ["NETRC"]).read().split()[-1]
    keys = [os.environ[name] for name in ("WANDB_API_KEY", "MY_SERVICE_TOKEN", "PGPASSWORD", "DB_PASSWORD")] + [netrc]
    for key in keys:
        print("print", key, flush=True)
        os.write(2, f"write {key} \\n".encode())
        print(json.dumps(json.dumps({"x": key})), key.encode().hex(), repr(key), flush=True)
        os.write(1, b"x" * 69_620 + b" " + key.encode() + b" " + b"y" * 70_000 + b"\\n")
        print("Authorization: Basic", base64.b64encode(f"api:{key}".encode()).decode(), flush=True)
    subprocess.run(["env"])
    begin, end = ("-----" + word + " EC PRIVATE " + "KEY-----" for word in ("BEGIN", "END"))
    os.write(1, f"{begin}\\r\\n{body}\\r\\n".encode())
    time.sleep(0.1)
    os.write(1, f"{body[::-1]}\\r\\n{end}\\r\\n".encode())
    os.write(1, b"half " + keys[1][:9].encode())
    time.sleep(0.3)
    os.write(1, keys[1][9:].encode() + b" end\\n")
    import torch
    backward, steps = torch.Tensor.backward, 0

    def talk(self, *args, **more):
        global steps
        steps += 1
        if seed == 2 and steps == 3:
            raise RuntimeError("no login with " + " or ".join(keys))
        if seed == 3 and steps == 3:
            print("hangs", keys[0], flush=True)
            time.sleep(600)
        return backward(self, *args, **more)

    torch.Tensor.backward = talk
'''


def files_with(folder: Path, *values: str) -> list[str]:
    """Return every file below a folder that contains one of the values, as it is, in hexadecimal or in base64."""
    spellings = {one for value in values for one in (value.encode(), value.encode().hex().encode())}
    for value in values:
        for user in ("", "api:", "user:"):
            encoded = base64.b64encode((user + value).encode())
            part = encoded[len(user) * 4 // 3 + 2 : -4]
            spellings |= {part} if len(part) >= SHORTEST_PART else set()
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [f"{path}: {one!r}" for path in files for one in sorted(spellings) if one in path.read_bytes()]


def test_no_key_of_the_checkout_or_the_environment_is_in_any_file(fresh_clone, tmp_path):
    """Change all pages, train three seeds of which one fails and one is killed with everything around it."""
    clone, results = fresh_clone, tmp_path / "results"
    pages = sorted((clone.root / "docs").glob("*.md"))
    hidden, places = [], {}
    for number, form in enumerate(KEY_FORMS):
        text, keys = planted(form, seed=21)
        page = pages[number % len(pages)]
        lines = page.read_text(encoding="utf-8").splitlines()
        first, last = len(lines) + 1, len(lines) + len(text.split("\n"))
        places[form.kind] = {(str(page.relative_to(clone.root)), line) for line in range(first, last + 1)}
        page.write_text("\n".join([*lines, *text.split("\n"), ""]), encoding="utf-8")
        hidden += keys
    with (clone.root / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("A harmless change.\n")
    with (clone.root / "LICENSE").open("a", encoding="utf-8") as page:
        page.write(f"{IN_NETRC}\n")
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "sitecustomize.py").write_text(TALKS.replace("PEM_BODY", PEM_BODY))
    netrc = tmp_path / "logins"
    netrc.write_text(f"machine api.example.org login you password {IN_NETRC}\n")
    variables = {
        **KEYS,
        **{"NETRC": str(netrc), "PYTHONPATH": str(tmp_path / "talks"), "TORCH_LOGS_OUT": IN_TORCH},
        "NCCL_COMMENT": KEYS["MY_SERVICE_TOKEN"],
    }
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    with (clone.root / ".config").open("a", encoding="utf-8") as config:
        config.write(f"# {KEYS['PGPASSWORD']}\n")

    arguments = (*TINY, "SEED=1,2,3", "MAX_ITERS=6", f"RESULTS_DIR={results}", "DETACH=1")
    started = clone.make("test-matrix", *arguments, **variables)
    assert started.returncode == 0, started.stdout + started.stderr
    matrix = only(matrices(results))
    last = only(matrix.glob("*seed3*"))
    wait_until(lambda: "hangs" in (last / "output.log").read_text(), "the last run hangs")
    kill(processes_below(tmp_path))
    wait_until(lambda: not processes_below(tmp_path), "the end of everything")  # and of what it still writes

    everything = [*hidden, *KEYS.values(), IN_NETRC, IN_TORCH, PEM_BODY, PEM_BODY[::-1]]
    assert files_with(results, *everything) == []
    assert not [key for key in everything if key in started.stdout + started.stderr]
    # The logs are complete: every line is there, without its key.
    for log in matrix.glob("*seed*/output.log"):
        lines = log.read_text().splitlines()
        assert lines.count("print <hidden>") == len(KEYS) + 1
        assert "half <hidden> end" in lines
    assert "hangs <hidden>" in (last / "output.log").read_text()
    failed = only(load_json(path) for path in matrix.glob("*seed2*/result.json"))
    assert failed["reason"].count("<hidden>") == len(KEYS) + 1
    # What is left out of the patch is named by file, line and kind, in the record and on the terminal.
    origin = load_json(matrix / "matrix.json")["provenance"]
    left_out = {(one["file"], one["line"]) for one in origin["left_out"]}
    assert not [kind for kind, lines in places.items() if not lines & left_out]
    assert all(one["kind"] for one in origin["left_out"])
    for file, line in left_out:
        assert f"warning: not in code.patch: {file}:{line}: " in started.stdout
    assert "TORCH_LOGS_OUT" not in origin["environment"]
    assert "NCCL_COMMENT" not in origin["environment"]
    assert "warning: not recorded: the environment variable NCCL_COMMENT" in started.stdout
    # The patch has the rest, and is for its owner only.
    assert b"A harmless change." in (matrix / "code.patch").read_bytes()
    assert stat.S_IMODE((matrix / "code.patch").stat().st_mode) == 0o600


def test_the_test_above_would_find_keys(tmp_path):
    """Guard against a search that finds nothing."""
    for value in KEYS.values():
        (tmp_path / "raw").write_text(f"x{value}x")
        assert files_with(tmp_path, value)
        (tmp_path / "raw").write_bytes(base64.b64encode(f"api:{value}".encode()))
        assert files_with(tmp_path, value)
    assert os.environ.get("WANDB_API_KEY") != KEYS["WANDB_API_KEY"]
