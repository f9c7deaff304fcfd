"""The command that shows what the runs of a matrix wrote for TensorBoard."""

from __future__ import annotations

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.pages import announce
from kmatrix.cli.session import shown
from kmatrix.cli.targets import find_target
from kmatrix.cli.trackers import need_trackers, port
from kmatrix.errors import RecordError
from kmatrix.track.page import LOOPBACK, wait_for_the_end
from kmatrix.track.tensorboard_page import recorded, serve


def show(arguments: Arguments) -> int:
    """Serve TensorBoard's page of TARGET=, the newest matrix by default, until Ctrl+C."""
    matrix = find_target(arguments)
    folder = matrix.tensorboard
    if not recorded(folder):
        raise RecordError(
            f"{shown(matrix.path)} has nothing for TensorBoard",
            fix="run a matrix with TRACKER=tensorboard, or pass TARGET=<another matrix>",
        )
    need_trackers(["tensorboard"])
    wanted, host = port(arguments, "tensorboard"), arguments.get("HOST", LOOPBACK)
    page = serve(folder, host, wanted)
    announce(f"TensorBoard's page of {shown(folder)}", page, [f"URL: {page.url}"], host=host, wanted=wanted)
    wait_for_the_end()
    print("\nTensorBoard's page has ended")
    return 0
