"""The patch of uncommitted changes holds no key: a hunk with one is left out, and named without the key."""

from __future__ import annotations

import random
import string
import subprocess

import pytest

from key_forms import KEY_FORMS, planted
from kmatrix.experiment.code_patch import LeftOut, code_patch

pytestmark = pytest.mark.process

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
LINES = [f"line_{number} = {number}\n" for number in range(60)]


def git(root, *arguments):
    return subprocess.run(
        ["git", "-C", str(root), *IDENTITY, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one source of 60 lines."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("".join(LINES))
    (tmp_path / "other.py").write_text("one = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "train.py", "other.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def change(repository, lines):
    """Change lines of train.py. lines: number from 1 -> new text without its end."""
    new = [lines.get(number, line[:-1]) + "\n" for number, line in enumerate(LINES, start=1)]
    (repository / "train.py").write_text("".join(new))


def with_keys(seed):
    """Return lines with a key of each form, apart for hunks of their own; by kind: keys, first and last line."""
    lines, planted_at = [], {}
    for number, form in enumerate(KEY_FORMS):
        lines += [f"before_{number}_{line} = 0" for line in range(20)]
        text, keys = planted(form, seed)
        planted_at[form.kind] = (keys, len(lines) + 1, len(lines) + len(text.split("\n")))
        lines += text.replace("\r", "").split("\n")
    return [*lines, *(f"last_{line} = 0" for line in range(12))], planted_at


def test_each_hunk_with_a_key_is_left_out_and_named_by_file_line_and_kind(repository):
    lines, planted_at = with_keys(seed=11)
    plain = [line for line in lines if " = 0" in line]
    (repository / "train.py").write_text("\n".join(plain) + "\n")
    git(repository, "commit", "-qam", "without keys")
    harmless = [line.replace("_9 = 0", "_9 = 1") for line in lines]
    (repository / "train.py").write_text("\n".join(harmless) + "\n")

    patch = code_patch(repository)

    assert patch.data is not None
    everything = [key for keys, _, _ in planted_at.values() for key in keys]
    assert not [key for key in everything for one in patch.left_out if key in one.describe()]
    assert not [key for key in everything if key.encode() in patch.data]
    at = {(one.file, one.line): one.kind for one in patch.left_out if one.kind}
    for kind, (_, first, last) in planted_at.items():
        assert {("train.py", line) for line in range(first, last + 1)} & at.keys(), kind
    assert {line for _, line in at} <= {n for _, first, last in planted_at.values() for n in range(first - 3, last + 1)}
    for number in range(len(KEY_FORMS)):
        assert f"+before_{number}_9 = 1".encode() in patch.data


def test_keys_in_removed_lines_and_in_the_context_count(repository):
    lines, planted_at = with_keys(seed=12)
    (repository / "train.py").write_text("\n".join(lines) + "\n")
    git(repository, "commit", "-qam", "keys")

    (repository / "train.py").write_text("\n".join(line for line in lines if " = 0" in line) + "\n")
    removed = code_patch(repository)
    (repository / "train.py").write_text("\n".join(line.replace("_0 = 0", "_0 = 1") for line in lines) + "\n")
    context = code_patch(repository)

    for patch in (removed, context):
        assert patch.left_out
        for kind, (keys, _, _) in planted_at.items():
            assert not [key for key in keys if key.encode() in (patch.data or b"")], kind


def test_the_rest_of_the_patch_applies(repository, tmp_path_factory):
    key = "hf_" + "aB3" * 12
    change(repository, {3: f"a = 1\nb = {key!r}\nc = 3", 30: "lr = 0.1\nmore = 2", 55: "wd = 0.2"})
    (repository / "other.py").write_text("one = 2\n")

    patch = code_patch(repository)

    copy = tmp_path_factory.mktemp("then") / "code"
    git(repository, "worktree", "add", "-q", str(copy), "HEAD")
    (copy.parent / "patch").write_bytes(patch.data)
    git(copy, "apply", "--unidiff-zero", str(copy.parent / "patch"))
    assert (copy / "train.py").read_text() == "".join(
        {30: "lr = 0.1\nmore = 2\n", 55: "wd = 0.2\n"}.get(number, line) for number, line in enumerate(LINES, start=1)
    )
    assert (copy / "other.py").read_text() == "one = 2\n"


def test_values_of_the_environment_and_of_netrc_are_left_out_whatever_they_look_like(repository, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct horse battery")
    (repository / ".netrc").write_text("machine api.example.org login you password staple-of-you\n")
    change(repository, {5: "note = 'correct horse battery'", 30: "# staple-of-you", 55: "wd = 0.2"})

    patch = code_patch(repository)

    assert [(one.line, one.kind) for one in patch.left_out] == [
        (5, "value of the variable MY_SERVICE_TOKEN"),
        (30, f"value of the file {repository}/.netrc"),
    ]
    assert b"wd = 0.2" in patch.data


def test_a_key_in_the_name_of_a_file_is_left_out(repository):
    name = "hf_" + "aB3" * 12
    (repository / f"{name}.py").write_text("x = 1\n")
    git(repository, "add", ".")

    patch = code_patch(repository)

    assert [one.file for one in patch.left_out] == ["(file name)"]
    assert patch.data is None


def test_a_line_that_its_author_marked_is_kept_unless_its_form_is_that_of_a_key(repository):
    allowed = "digest = '" + "".join(random.Random(1).choices(string.hexdigits[:16], k=40)) + "'"
    token = "ghp_" + "".join(random.Random(2).choices(string.ascii_letters + string.digits, k=36))
    change(repository, {5: f"{allowed}  # pragma: allowlist secret", 30: f"t = '{token}'  # pragma: allowlist secret"})

    patch = code_patch(repository)

    assert allowed.encode() in patch.data
    assert token.encode() not in patch.data


ORDINARY = (
    "loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))",
    "token = tokenizer.decode(ids[:max_tokens2])",
    "joules_per_token = 4.123456789",
    "        password = getpass.getpass()",
    "api_key = os.environ['OPENAI_API_KEY']",
    "# as in commit 3f2a, see https://example.org/a/b#c",
    "connect(host, password=password, token=self.token)",
    'headers = {"Authorization": f"Bearer {api_key}"}',
    'url = f"https://{user}:{password}@{host}/x"',
    "export HF_TOKEN=hf_... WANDB_API_KEY=<yours> GH_TOKEN=$GITHUB_TOKEN",
    "TOKEN=$(shell cat token) MAX_TOKEN=1024",
    "bash -c 'curl -u you:$PASSWORD https://example.org'",
    'parser.add_argument("--token", help="token of the hub")',
    "-----BEGIN CERTIFICATE-----",
    'parser.add_argument("--tokens-per-second", type=float, default=None, help="measured speed in tokens/s")',
)


def test_ordinary_code_is_kept(repository):
    change(repository, {5: "\n".join(ORDINARY)})
    patch = code_patch(repository)
    assert patch.left_out == ()
    assert [line for line in ORDINARY if line.encode() not in patch.data] == []


def test_without_the_detectors_there_is_no_patch(repository, monkeypatch):
    monkeypatch.setattr("kmatrix.experiment.code_patch._plugins", lambda: None)
    change(repository, {5: "lr = 0.1"})

    assert code_patch(repository).data is None
    assert "detect-secrets is not installed" in code_patch(repository).why


def test_a_binary_file_cannot_be_searched_and_is_left_out(repository):
    (repository / "picture.png").write_bytes(bytes(range(256)))
    git(repository, "add", "picture.png")
    change(repository, {5: "lr = 0.1"})

    patch = code_patch(repository)

    assert patch.left_out == (LeftOut("picture.png", 0, "binary file, not searched for keys"),)
    assert b"picture" not in patch.data


def test_the_file_that_netrc_names_counts(repository, monkeypatch, tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "logins"
    path.write_text("machine a login b password staple-of-you\n")
    monkeypatch.setenv("NETRC", str(path))
    change(repository, {5: "note = 'staple-of-you'"})

    assert code_patch(repository).data is None
    assert code_patch(repository).why == "every change contains a key, or cannot be searched for keys"
