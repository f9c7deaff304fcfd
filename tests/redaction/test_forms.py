"""The patterns of keys: linear time on any text, no false alarms on ordinary lines, and private keys line by line."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser

import pytest

from kmatrix.redaction.forms import ANNOUNCED, FORMS, HIDDEN, LONGEST_KEY, NAMED, SHELL, PrivateKeys
from kmatrix.redaction.log import LineRedactor
from kmatrix.redaction.redactor import redact
from programs import ROOT

ALL = (*FORMS, *ANNOUNCED, NAMED, SHELL)
HOSTILE_BYTES = 64_000
HOSTILE_S = 60  # for all texts together; they take 2 s, and a quadratic pattern alone takes longer
HOSTILE = """
import sys
from kmatrix.redaction.forms import ANNOUNCED, FORMS, NAMED, SHELL, PrivateKeys
from kmatrix.redaction.redactor import redact
size = int(sys.argv[1])
texts = ["a-", "a://b:", "://", "MMMMMMMMMMMMMMMMMMMMMMMM.", "0123456789abcdef", "abcdefghijklmnop '", "curl -u ", "'",
         "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "PRIVATE KEY", "login a password ", "password=<|a"]
for form in (*FORMS, *ANNOUNCED, NAMED, SHELL):
    for anchor in form.anchors:
        for piece in (anchor, anchor + " a"):
            form.hide((piece * size)[:size])
for text in texts:
    text = (text * size)[:size]
    redact(text, {"MY_TOKEN": "correct-horse"})
    keys = PrivateKeys()
    keys.hide("-----BEGIN PRIVATE KEY-----\\n"), keys.hide(text + "!")
print("done")
"""


def unbounded(parsed):
    """Yield the repetitions without an upper bound in a pattern, each with whether it is possessive and comes last."""
    items = list(parsed)
    for place, (code, argument) in enumerate(items):
        # Nothing after it can fail: only repetitions that may be empty.
        last = all(str(more).endswith("REPEAT") and value[0] == 0 for more, value in items[place + 1 :])
        if str(code).endswith("REPEAT"):
            _, most, inner = argument
            if most == codes.MAXREPEAT:
                yield str(code) == "POSSESSIVE_REPEAT" and last
            yield from (fine and last for fine in unbounded(inner))
        elif code is codes.SUBPATTERN:
            yield from (fine and last for fine in unbounded(argument[3]))
        elif code is codes.BRANCH:
            yield from (fine and last for branch in argument[1] for fine in unbounded(branch))
        elif code in (codes.ASSERT, codes.ASSERT_NOT):
            yield from (False for _ in unbounded(argument[1]))


def test_every_repetition_of_a_pattern_is_bounded_or_comes_last():
    assert [form.kind for form in ALL if not all(unbounded(parser.parse(form.regex, form.flags)))] == []


def test_the_test_above_would_find_unbounded_repetitions():
    for regex in ("a*b", "(?:a+)b", "(?=a*)b", "a+", "(a++)b", "a++(?=b)"):
        assert not all(unbounded(parser.parse(regex))), regex
    assert all(unbounded(parser.parse("a{1,9}b++=*+")))


@pytest.mark.nightly
def test_hostile_texts_take_linear_time():
    command = [sys.executable, "-c", HOSTILE, str(HOSTILE_BYTES)]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT / "lib")}, capture_output=True, text=True, timeout=HOSTILE_S, check=True
    )
    assert done.stdout == "done\n"


def test_anchors_are_in_lower_case_because_the_text_is():
    assert [anchor for form in ALL for anchor in form.anchors if anchor != anchor.lower()] == []


def test_nothing_in_the_log_of_a_real_run_is_hidden():
    log = gzip.decompress((Path(__file__).parents[1] / "fixtures" / "output.log.gz").read_bytes())
    lines = LineRedactor({})

    assert log.count(b"\n") > 1_900
    assert b"".join(lines.feed(line) for line in log.splitlines(keepends=True)) + lines.finish() == log
    assert redact(log.decode(), {}) == log.decode()


ORDINARY = (
    "commit 0123456789abcdef0123456789abcdef01234567 of https://github.com/you/repo.git",
    "git@github.com:you/repo.git ssh://git@example.org:22/repo ssh://some-long-user-name@host",
    "sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef  fineweb_val_000000.bin",
    "Iter 10 | epoch 0 | loss 5.4859 | lr 1.12e-04 | norm 2.19 | dt 10.0ms | tok/s 12849 | mfu n/a",
    "joules_per_token=4.123456789 max_token: 4.25, max_token=50256 tokens/s: 123456789",
    "eos_token='<|endoftext|>' pad_token=[PAD] unk_token: <unk_token> tokenizer=gpt2-medium-tokenizer",
    '    token = kwargs.pop("token", None)',
    "    unk_token = self.original_tokenizer.unk_token",
    "checkpoint: /home/you/results/test_matrix_results_20261122_183137/gpt2_adamw/checkpoints/step_00001950.pt",
    "wandb: View run gpt2_adamw at https://wandb.ai/you/kmatrix/runs/abcdefgh",
    "wandb: Run `wandb login` to upload; see the authorization documentation, then log in again",
    "local-rank 0, task-0123456789abcdefghij, disk-0123456789abcdefghijk, risk-free-2026-abcdefghijk",
    "[rank0]:[W1122 18:31:20.123456789 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called",
    "fx graph cache key fdhcpnmpzv5snpzu4jxg6cnjhytqpygx2sg6pkcpmd6dmsgmz4ra was not found",
    "CUDA_VISIBLE_DEVICES=GPU-01234567-89ab-cdef-0123-456789abcdef NCCL_SOCKET_IFNAME=eth0",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 79 GiB",
    '  File "/home/you/kmatrix/gpt2/train.py", line 123, in train',
    "GET /v1/models?page=2&sort=name HTTP/1.1 200 http://localhost:8000/a@b",
    "the password of the database was not found, and the secret garden is a book",
    "data: HuggingFaceFW/fineweb-edu sample-10BT, 10,000,000,000 tokens, glorious-experiment-number-31",
    "-----BEGIN CERTIFICATE-----",
    "PWD=/home/you/kmatrix OLDPWD=/home/you",
)


def test_ordinary_lines_stay_as_they_are():
    assert [line for line in ORDINARY if redact(line, {}) != line] == []


def private_key(line_end="\n"):
    begin, end = ("-----" + word + " RSA PRIVATE " + "KEY-----" for word in ("BEGIN", "END"))
    return f"{begin}{line_end}", f"{end}{line_end}"


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_lines_of_others_inside_a_private_key_are_kept(line_end):
    begin, end = private_key(line_end)
    body = f"MIIEpAIBAAKCAQEAabcdefgh0123456789{line_end}"
    keys = PrivateKeys()

    kept = [
        keys.hide(line) for line in ("a\n", begin, body, "Iter 10 | loss 3.45\n", body, f"x=={line_end}", end, "b\n")
    ]

    assert kept == ["a\n", f"{HIDDEN}{line_end}", "", "Iter 10 | loss 3.45\n", "", "", "", "b\n"]


def test_a_private_key_that_is_cut_off_in_its_line_is_hidden_as_far_as_it_goes():
    begin = private_key("")[0]

    assert redact(f"key={begin!r}\\nMIIEpAIBAAKCAQEAabcdefgh0123456789\\nabcd... is bad", {}).endswith("... is bad")
    assert "MIIEpAIBAAKC" not in redact(f"{begin}\\nMIIEpAIBAAKCAQEAabcdefgh0123456789... is bad", {})


def test_a_private_key_without_an_end_does_not_hide_the_rest_of_the_log():
    keys = PrivateKeys()
    keys.hide(private_key()[0])

    assert [keys.hide("line\n") for _ in range(LONGEST_KEY + 10)][-1] == "line\n"
