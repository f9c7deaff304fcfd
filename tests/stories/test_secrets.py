"""No key reaches the results: those of the environment do not reach what writes them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from story import kill, load_json, processes_below
from waiting import wait_until

pytestmark = pytest.mark.story

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
TALKER = '''
"""A trainer that prints its whole environment. The second seed fails, the first one hangs."""
import json, os, signal, subprocess, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--attempt") - 1])
plan = json.loads((folder / "run.json").read_text())
print(json.dumps(dict(os.environ)), flush=True)
subprocess.run(["env"])
if plan["train"]["seed"] == 1338:
    raise RuntimeError("no login with " + " or ".join(os.environ.values()))
print("hangs", flush=True)
signal.pause()
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


def test_no_key_of_the_environment_is_in_any_file(story, tmp_path):
    """One run fails, the other one is killed with everything around it."""
    clone = story.clone
    (clone.root / "gpt2" / "train.py").write_text(TALKER)
    netrc = tmp_path / "logins"
    netrc.write_text(f"machine api.example.org login you password {IN_NETRC}\n")
    variables = {**KEYS, "NETRC": str(netrc), "TORCH_LOGS_OUT": IN_TORCH, "NCCL_COMMENT": KEYS["MY_SERVICE_TOKEN"]}
    with clone.config.open("a", encoding="utf-8") as config:
        config.write(f"# {KEYS['PGPASSWORD']}\n")

    words = story.words("OPTIMIZER=adamw", "SEED=1338,1337", "TRACKER=trackio", "DETACH=1")
    started = clone.make("test-matrix", *words, **variables)
    assert started.returncode == 0, started.stdout + started.stderr
    matrix = story.newest()
    last = matrix.run("gpt2_adamw_seed1337_1cpu").output_log
    wait_until(lambda: last.exists() and "hangs" in last.read_text(), "the last run hangs")
    kill(processes_below(tmp_path))
    wait_until(lambda: not processes_below(tmp_path), "the end of everything")  # and of what it still writes

    everything = [*KEYS.values(), IN_NETRC, IN_TORCH]
    assert files_with(story.results, *everything) == []
    assert not [key for key in everything if key in started.stdout + started.stderr]
    assert "PATH=" in last.read_text()  # it did print its environment
    origin = load_json(matrix.matrix_json)["common"]["provenance"]
    assert not {"TORCH_LOGS_OUT", "NCCL_COMMENT"} & set(origin["environment"])


def test_the_test_above_would_find_keys(tmp_path):
    """Guard against a search that finds nothing."""
    for value in KEYS.values():
        (tmp_path / "raw").write_text(f"x{value}x")
        assert files_with(tmp_path, value)
        (tmp_path / "raw").write_bytes(base64.b64encode(f"api:{value}".encode()))
        assert files_with(tmp_path, value)
