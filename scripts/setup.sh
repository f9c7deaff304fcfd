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
    core) what="." && about="core packages: kconfiglib, rich, numpy, scipy, msgspec, matplotlib (about 80 MB)" ;;
    train) what=".[train]" && about="torch and readers of data: about 260 MB for the CPU build, 3 GB with CUDA" ;;
    trackers) what=".[trackers]" && about="W&B, Trackio, TensorBoard (about 350 MB)" ;;
    dev) what=".[train,trackers,dev]" && about="tools of make check: ruff, mypy, pytest, transformers (about 120 MB)" ;;
esac
echo "setup: installing into .venv: $about"
[ -x .venv/bin/python ] || "$python" -m venv .venv
export PIP_CONSTRAINT="$PWD/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1
[ -t 1 ] && quiet= || quiet=--quiet # no progress bars in a log
# torch alone from the other index, which has no other package; the next install then finds it in place.
if [ "$stage" = train ] && [ -n "${TORCH_INDEX:-}" ]; then
    .venv/bin/python -m pip install $quiet --index-url "$TORCH_INDEX" torch
fi
.venv/bin/python -m pip install $quiet --editable "$what"

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
