"""Scripts for runs over several nodes without a scheduler: the user starts one on each node."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.running.jobs import empty_folder
from kmatrix.cli.running.make import make_dirs
from kmatrix.engines.local.engine import trainer_variables
from kmatrix.engines.spread import RENDEZVOUS_S
from kmatrix.experiment.plan import Plan
from kmatrix.paste import make_command
from kmatrix.records.paths import ROOT
from kmatrix.runner.resume import reopen
from kmatrix.status.state import RunPlan
from kmatrix.text import plural, shown

SCRIPT = """\
#!/usr/bin/env bash
# {name}: {ranks} on {nodes}.
# On each node:  bash {file} NODE HOST [ARGUMENT ...]
# NODE: the number of the node, from 0 to {last}.  HOST: the name or address of node 0, the same on all nodes.
# ARGUMENT: of the trainer; to go on from the last checkpoint: --attempt 2 --resume auto
# PORT=29501 in the environment, if two runs have the same node 0.
set -eu
node=${{1:?NODE, from 0 to {last}}} host=${{2:?HOST, the name or address of node 0}}
# With a number that the run does not have, torchrun would wait for the other nodes for 15 minutes.
if ! [[ $node =~ ^(0|[1-9][0-9]*)$ ]] || [ "$node" -gt {last} ]; then
    echo "error: NODE is $node, expected 0 to {last}" >&2
    exit 2
fi
cd {root}
{exports}
if [ "$node" = 0 ]; then
    # For make logs. Ctrl+C reaches all of this terminal: the log must outlive the ranks, which save a checkpoint.
    exec > >(trap '' INT TERM HUP; exec tee -a {log}) 2>&1
fi
exec {python} -m torch.distributed.run --nnodes={count} --nproc-per-node={width} --node-rank="$node" \\
    --master-addr="$host" --master-port="${{PORT:-29500}}" --rdzv-conf=timeout={timeout} \\
    {command} "${{@:3}}"
"""


def render_by_hand(arguments: Arguments, plan: Plan) -> None:
    """Make a matrix without running it, and write a script for each run to RENDER=, for the user to start."""
    folder = Path(arguments.get("RENDER")).expanduser().resolve()
    empty_folder(folder)
    matrix, _ = make_dirs(arguments, plan, reuse=True, rendered=True)
    runs = reopen(matrix, plan.gpus).plans
    print(f"{plural(len(runs), 'run')} in {shown(matrix.path)}, not started")
    for run in runs:
        script = folder / f"{run.name}.sh"
        script.write_text(script_of(run, script.name), encoding="utf-8")
        print(f"  {plural(run.nodes, 'node')}: bash {shlex.quote(shown(script))} NODE HOST")
    print("start each on all of its nodes: NODE is 0, 1, ...; HOST is the name or address of node 0")
    print(f"watch: {make_command('status', matrix.path)}")


def script_of(run: RunPlan, file: str) -> str:
    """Return the script that starts a run on one of its nodes. file: its name."""
    variables = trainer_variables(run, ROOT)
    if run.cuda:
        variables.pop("CUDA_VISIBLE_DEVICES", None)  # the user's own choice, on each node
    return SCRIPT.format(
        name=run.name,
        file=file,
        ranks=plural(run.ranks, "rank"),
        nodes=plural(run.nodes, "node"),
        last=run.nodes - 1,
        root=shlex.quote(str(ROOT)),
        exports="\n".join(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
        log=shlex.quote(str(run.dir.output_log)),
        python=shlex.quote(sys.executable),
        count=run.nodes,
        width=run.ranks_per_node,
        timeout=RENDEZVOUS_S,
        command=shlex.join([*run.command, *run.arguments]),
    )
