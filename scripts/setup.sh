# Make one stage of .venv: core, train, trackers or dev. Called by the Makefile if pyproject.toml or constraints.txt is
# newer than the stage; their checksum decides, because a copy of a checkout has new times.
set -eu
stage=$1
python=${KMATRIX_BASE_PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "error: kmatrix needs Python 3.11 or newer as $python" >&2
    echo "  hint: install it, or pass PYTHON=<interpreter that has everything>" >&2
    exit 2
}
sum=$(cat pyproject.toml constraints.txt | cksum)
if [ "$(cat ".venv/.$stage" 2>/dev/null)" = "$sum" ]; then
    touch ".venv/.$stage"
    exit 0
fi
case $stage in
    core) about="core packages: kconfiglib, rich, numpy, scipy, msgspec, matplotlib (about 80 MB)" ;;
    train) about="torch and readers of data: about 260 MB for the CPU build, 3 GB with CUDA" ;;
    trackers) about="W&B, Trackio, TensorBoard (about 350 MB)" ;;
    dev) about="tools of make check: ruff, mypy, pytest, transformers (about 120 MB)" ;;
esac
echo "setup: installing into .venv: $about"
[ -x .venv/bin/python ] || "$python" -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_CONSTRAINT PIP_REQUIRE_HASHES # the files below say everything
[ -t 1 ] && quiet= || quiet=--quiet # no progress bars in a log

# Install the packages of a stage: the versions of constraints.txt, and only files whose hashes it lists. --no-deps: the
# list is complete, so nothing else may come in. A second argument is left out.
install() {
    list=".venv/.$1.requirements"
    awk -v stage="$1" -v without="${2:-}" '
        /^# / { wanted = index(" " substr($0, 3) " ", " " stage " ") }
        /^[A-Za-z0-9]/ && without != "" && index($0, without "==") == 1 { wanted = 0 }
        /^[A-Za-z0-9 ]/ && wanted
    ' constraints.txt >"$list"
    .venv/bin/python -m pip install $quiet --no-deps --require-hashes --requirement "$list"
}

without=
if [ "$stage" = train ] && [ -n "${TORCH_INDEX:-}" ]; then
    # From the index that the user names, whose files have other hashes: it is trusted instead of them.
    without=torch
    pin=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
    .venv/bin/python -m pip install $quiet --index-url "$TORCH_INDEX" "torch==$pin"
fi
install "$stage" "$without"
# The CUDA build of torch needs 17 packages more, the CPU build none of them.
if [ "$stage" = train ] && [ -z "$without" ] && .venv/bin/python -c '
import sys
from importlib.metadata import requires
sys.exit(not any(line.startswith(("nvidia-", "cuda-")) and "extra ==" not in line for line in requires("torch") or ()))
'; then
    install cuda
fi
# kmatrix itself. Its dependencies are there; with build isolation, pip would download setuptools without a hash.
.venv/bin/python -m pip install $quiet --no-deps --no-build-isolation --editable .

# pip writes absolute paths to this checkout; with relative ones a copy of the checkout runs its own code.
for path in .venv/lib/python*/site-packages/__editable__.kmatrix-*.pth; do
    echo ../../../../lib >"$path"
done
cat >.venv/bin/kmatrix <<'SCRIPT'
#!/bin/sh
bin=$(dirname "$0")
[ -f "$bin/../pyvenv.cfg" ] || bin=$(dirname "$(readlink -f "$0")") # called through a link to this file
exec "$bin/python" -P -m kmatrix "$@" # -P: a file kmatrix.py in the current directory is not imported
SCRIPT
# Last: a stage that failed half-way has no mark, and is installed again.
echo "$sum" >".venv/.$stage"
echo "setup: $stage is ready"
