# Make one stage of .venv: core, train, trackers or dev. Called by the Makefile, once for each change of pyproject.toml.
set -eu
stage=$1
python=${KMATRIX_BASE_PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "error: kmatrix needs Python 3.11 or newer as $python" >&2
    echo "  fix: install it, or pass PYTHON=<interpreter that has everything>" >&2
    exit 2
}
case $stage in
    core) what="." && about="core packages: kconfiglib, rich, numpy, msgspec, matplotlib (about 60 MB)" ;;
    train) what=".[train]" && about="torch and readers of data: about 260 MB for the CPU build, 3 GB with CUDA" ;;
    trackers) what=".[trackers]" && about="W&B, Trackio, TensorBoard (about 350 MB)" ;;
    dev) what=".[train,trackers,dev]" && about="tools of make check: ruff, mypy, pytest, transformers (about 120 MB)" ;;
esac
echo "setup: installing into .venv: $about"
[ -x .venv/bin/python ] || "$python" -m venv .venv
export PIP_CONSTRAINT="$PWD/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1
[ -t 1 ] && quiet= || quiet=--quiet
if [ "$stage" = train ] && [ -n "${TORCH_INDEX:-}" ]; then
    .venv/bin/python -m pip install $quiet --index-url "$TORCH_INDEX" torch
fi
.venv/bin/python -m pip install $quiet --editable "$what"
touch ".venv/.$stage"
echo "setup: $stage is ready"
