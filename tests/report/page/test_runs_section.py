"""The table of runs, the configurations, failures and provenance on the page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from html_reader import read_html
from kmatrix.records.files import write_json
from kmatrix.report.analysis import analyse
from kmatrix.report.page.assemble import render_page
from page_sections import page, page_of, rows, section
from records_factory import FakeRun, make_matrix, replan, runs_with_seeds

EVIL = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
LOSSES = {"adamw": (3.281, 3.284, 3.279), "lion": (3.270, 3.268, 3.272)}


def two_optimizers(**fields: object) -> list[FakeRun]:
    return [
        run
        for optimizer, losses in LOSSES.items()
        for run in runs_with_seeds(len(losses), losses, optimizer=optimizer, **fields)
    ]


def test_the_table_has_every_run_in_the_order_of_the_ranking(tmp_path):
    table = section(page(tmp_path, two_optimizers()), "runs-table")
    heads = [head.text for head in table.one("thead").all("th")]
    assert heads == [
        "run",
        "status",
        "optimizer",
        "seed",
        "final loss",
        "best loss",
        "steps",
        "tokens/s",
        "time",
        "peak MiB",
    ]
    assert [(row[0], row[3], row[4]) for row in rows(table)] == [
        *((f"gpt2_lion_seed{seed}_1cpu", str(seed), f"{LOSSES['lion'][seed - 1]:.4f}") for seed in (1, 2, 3)),
        *((f"gpt2_adamw_seed{seed}_1cpu", str(seed), f"{LOSSES['adamw'][seed - 1]:.4f}") for seed in (1, 2, 3)),
    ]


def test_an_unfinished_run_has_no_final_loss_in_the_table(tmp_path):
    runs = [
        *two_optimizers(),
        FakeRun(optimizer="sgd", status="stopped", reason="stopped by user", stop_at=40, result=False),
    ]
    table = section(page(tmp_path, runs), "runs-table")
    (row,) = [row for row in rows(table) if row[0] == "gpt2_sgd_1cpu"]
    assert row[1] == "stopped"
    assert row[4] == "–"  # seed
    assert row[5] != "–"  # but its best loss so far is known


def test_links_to_trackers_are_links_only_if_a_browser_may_open_them(tmp_path):
    matrix = make_matrix(tmp_path, two_optimizers())
    targets = {"wandb": "https://wandb.ai/me/x/runs/1?a=1&b=2", "trackio": "javascript:alert(1)"}
    entries = [{"tracker": name, "state": "done", "points": 3, "link": link} for name, link in targets.items()]
    write_json(matrix.run("gpt2_adamw_seed1_1cpu").track, {"trackers": entries})
    found = section(page_of(matrix), "runs-table")
    (link,) = found.all("a")
    assert (link.text, link.attributes["href"]) == ("wandb", targets["wandb"])
    assert link.attributes["rel"] == "noopener noreferrer"
    assert "javascript:alert(1)" in found.text


def test_settings_are_compared_with_those_of_the_leader(tmp_path):
    runs = two_optimizers(asked=("GPT2_LEARNING_RATE",))
    rates = {"adamw": 6e-4, "lion": 0.02}
    runs = [replace(run, train={"learning_rate": rates[run.optimizer], "weight_decay": 0.1}) for run in runs]
    found = section(page(tmp_path, runs), "settings")
    assert [head.text for head in found.all("thead")[0].all("th")] == ["setting", "lion (leader)", "adamw"]
    assert rows(found.all("table")[0]) == [["learning_rate", "0.02", "0.0006"], ["optimizer", "lion°", "adamw°"]]
    assert "are the same everywhere" in found.text
    assert "seed" not in [row[0] for row in rows(found.all("table")[0])]


def test_failures_have_their_kind_reason_and_the_end_of_the_log(tmp_path):
    tail = ("Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory")
    told = {"status": "failed", "kind": "oom", "reason": "CUDA out of memory", "stop_at": 40, "log_tail": tail}
    runs = [*two_optimizers(), FakeRun(optimizer="sgd", result=False, **told)]
    found = section(page(tmp_path, runs), "failures")
    assert found.one("summary").text == "gpt2_sgd_1cpu CUDA out of memory after 40 of 100 steps"
    assert found.one("pre").lines == list(tail)
    assert found.one("code").text == "gpt2_sgd_1cpu/output.log"


def test_excluded_cells_and_their_reason_are_listed(tmp_path):
    found = section(page(tmp_path, two_optimizers(), cuts=[(4, "more GPUs than there are")]), "failures")
    assert found.one("h2").text == "Excluded cells"
    assert found.one("li").text == "4 cells: more GPUs than there are"


def test_provenance_says_what_was_run_and_how_to_repeat_it(tmp_path):
    found = section(page(tmp_path, two_optimizers()), "provenance")
    labels = [one.text for one in found.all("dt")]
    texts = dict(zip(labels, [one.text for one in found.all("dd")], strict=True))
    assert texts["Code"] == "git 8ea3763f00 with uncommitted changes"
    assert texts["Data"] == "stdlib, byte tokens, SHA-256 1a2b3c4d5e6f"
    commands = [one.one("code").text for one in found.all("span", "cmd")]
    assert commands == [
        "make test-matrix MAX_ITERS=100",
        "make reproduce RUN=test_matrix_results_20261120_052300/gpt2_lion_seed1_1cpu",
    ]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with hostile text wherever a user, or a file of somebody else, can put text."""
    tail = ("\x1b[31mred\x1b[0m " + EVIL, "\x1b]0;title\x07 " + "A" * 10_000, "\u202eevil {{ 7*7 }} {% raw %}")
    reason = EVIL + "\x1b[31m" + "B" * 10_000
    failed = {"status": "failed", "kind": EVIL, "reason": reason, "stop_at": 40, "log_tail": tail, "result": False}
    runs = [replace(run, train={"dataset": EVIL, EVIL: run.optimizer}) for run in two_optimizers()]
    runs.append(FakeRun(optimizer="sgd", seed=1, axes={"seed": "1"}, **failed))
    matrix = make_matrix(tmp_path_factory.mktemp("hostile"), runs, cuts=[(2, EVIL)])
    plan = json.loads(matrix.matrix_json.read_text())
    plan |= {"command": f"make test-matrix X='{EVIL}'\nrm -rf /", "overrides": [EVIL], "equal": EVIL}
    plan["provenance"] |= {"host": EVIL, "cpu": "\u202e" + EVIL, "git_commit": EVIL, "kernel": EVIL}
    write_json(matrix.matrix_json, plan)
    # The name of a directory cannot hold a slash: the values of a run can.
    replan(matrix, lambda record: record | {"axes": record["axes"] | {"note": EVIL}})
    for run in matrix.runs():
        write_json(
            run.track, {"trackers": [{"tracker": "wandb", "state": "done", "points": 1, "link": f"https://x/{EVIL}"}]}
        )
    return render_page(analyse(matrix))


def test_hostile_text_is_shown_as_text(hostile):
    found = read_html(hostile)
    assert not found.all("img")
    assert len(found.all("script")) == 4  # those of the page, and its data
    assert "owned" in found.text
    assert EVIL in found.text  # readable, whole
    assert "{{ 7*7 }} {% raw %}" in found.text


def test_hostile_text_has_no_control_characters_and_no_endless_lines(hostile):
    assert not any(character in hostile for character in "\x1b\x07\u202e\u202c")
    assert "␛[31mred" in hostile
    assert "A" * 1000 not in hostile
    assert "B" * 1000 not in hostile
    assert len(hostile) < 400_000


def test_a_command_to_paste_is_one_line(hostile):
    for command in read_html(hostile).all("span", "cmd"):
        assert "\n" not in "".join(map(str, command.one("code").children))
