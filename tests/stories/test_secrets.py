"""No key reaches the results: neither those in uncommitted changes, nor those that the trainer prints."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest

from fake_torchrun import install
from key_forms import KEY_FORMS, planted
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
PEM_BODY = "MHcCAQEEIPl4nt3dKeyAbCdEfGhIjKlMnOpQrStUvWxYz0123456789abcdefghij"
TALKER = '''
"""A trainer that prints every key that it knows, in all ways. The second seed fails with them; the first one hangs."""
import base64, json, os, signal, subprocess, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--attempt") - 1])
plan = json.loads((folder / "run.json").read_text())
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
for text in (f"{begin}\\r\\n@\\r\\n", f"{'@'[::-1]}\\r\\n{end}\\r\\n", "half " + keys[1][:9], keys[1][9:] + " end\\n"):
    os.write(1, text.replace("@", "PEM_BODY").encode())
if plan["train"]["seed"] == 1338:
    raise RuntimeError("no login with " + " or ".join(keys))
print("hangs", keys[0], flush=True)
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


def test_no_key_of_the_checkout_or_the_environment_is_in_any_file(story, tmp_path):
    """Change all pages; one run fails, the other one is killed with everything around it."""
    clone, pages = story.clone, sorted((story.clone.root / "docs").glob("*.md"))
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
    (tmp_path / "talker.py").write_text(TALKER.replace("PEM_BODY", PEM_BODY))
    netrc = tmp_path / "logins"
    netrc.write_text(f"machine api.example.org login you password {IN_NETRC}\n")
    variables = {**KEYS, "NETRC": str(netrc), "TORCH_LOGS_OUT": IN_TORCH, "NCCL_COMMENT": KEYS["MY_SERVICE_TOKEN"]}
    variables["PYTHONPATH"] = install(tmp_path / "talks", str(tmp_path / "talker.py"))
    with clone.config.open("a", encoding="utf-8") as config:
        config.write(f"# {KEYS['PGPASSWORD']}\n")

    words = story.words("OPTIMIZER=adamw", "SEED=1338,1337", "DETACH=1")
    started = clone.make("test-matrix", *words, **variables)
    assert started.returncode == 0, started.stdout + started.stderr
    matrix = story.newest()
    failed, last = (matrix.run(f"gpt2_adamw_seed{seed}_1cpu") for seed in (1338, 1337))
    wait_until(lambda: "hangs" in last.output_log.read_text(), "the last run hangs")
    kill(processes_below(tmp_path))
    wait_until(lambda: not processes_below(tmp_path), "the end of everything")  # and of what it still writes

    everything = [*hidden, *KEYS.values(), IN_NETRC, IN_TORCH, PEM_BODY, PEM_BODY[::-1]]
    assert files_with(story.results, *everything) == []
    assert not [key for key in everything if key in started.stdout + started.stderr]
    # The logs are complete: every line is there, without its key.
    for run in (failed, last):
        lines = run.output_log.read_text().splitlines()
        assert lines.count("print <hidden>") == len(KEYS) + 1
        assert "half <hidden> end" in lines
    assert "hangs <hidden>" in last.output_log.read_text()
    assert "no login with <hidden>" in load_json(failed.path / "status.json")["reason"]
    # What is left out of the patch is named by file, line and kind, in the record and on the terminal.
    origin = load_json(matrix.matrix_json)["provenance"]
    left_out = {(one["file"], one["line"]) for one in origin["left_out"]}
    assert not [kind for kind, lines in places.items() if not lines & left_out]
    for file, line in left_out:
        assert f"warning: not in code.patch: {file}:{line}: " in started.stdout
    assert not {"TORCH_LOGS_OUT", "NCCL_COMMENT"} & set(origin["environment"])
    assert "warning: not recorded: the environment variable NCCL_COMMENT" in started.stdout
    # The patch has the rest, and is for its owner only.
    assert b"A harmless change." in (matrix.path / "code.patch").read_bytes()
    assert stat.S_IMODE((matrix.path / "code.patch").stat().st_mode) == 0o600


def test_the_test_above_would_find_keys(tmp_path):
    """Guard against a search that finds nothing."""
    for value in KEYS.values():
        (tmp_path / "raw").write_text(f"x{value}x")
        assert files_with(tmp_path, value)
        (tmp_path / "raw").write_bytes(base64.b64encode(f"api:{value}".encode()))
        assert files_with(tmp_path, value)
