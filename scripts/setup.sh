# Make one stage of .venv: core, train, trackers or dev. Called by the Makefile if pyproject.toml or constraints.txt is
# newer than the stage; their checksum decides, because a copy of a checkout has new times.
set -eu
stage=$1
venv=.venv
python=${KMATRIX_BASE_PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "error: kmatrix needs Python 3.11 or newer as $python" >&2
    echo "  hint: install it, or pass PYTHON=<interpreter that has everything>" >&2
    exit 2
}
sum=$(cat pyproject.toml constraints.txt | cksum)
mark="$venv/.$stage"
if [ "$(cat "$mark" 2>/dev/null || true)" = "$sum" ]; then
    touch "$mark"
    exit 0
fi
echo "setup: installing $stage into $venv (about: core 80 MB; train 260 MB, 3 GB with CUDA; trackers 350 MB; dev 120 MB)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_CONSTRAINT PIP_REQUIRE_HASHES PIP_NO_BINARY # the files below say everything
pip="$venv/bin/python -m pip"
[ -t 1 ] && quiet= || quiet=--quiet # no progress bars in a log

# Install the packages of a stage: the versions of constraints.txt, and only files whose hashes it lists. --no-deps: the
# list is complete, so nothing else may come in. Wheels only: the set-up program of a source package would run.
# A second argument is the version of torch, "none" to leave it out.
install() {
    list="$venv/.$1.requirements"
    awk -v stage="$1" -v torch="${2:-}" '
        /^# / { wanted = index(" " substr($0, 3) " ", " " stage " ") }
        /^torch==/ && torch == "none" { wanted = 0 }
        /^torch==/ && torch { sub("==[^ ]*", "==" torch) }
        /^[A-Za-z0-9 ]/ && wanted
    ' constraints.txt >"$list"
    $pip install $quiet --no-deps --only-binary :all: --require-hashes --requirement "$list"
}

torch=
pin=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
if [ "$stage" = train ] && [ -n "${TORCH_INDEX:-}" ]; then
    # From the index that the user names, whose files have other hashes: it is trusted instead of them.
    torch=none
    $pip install $quiet --only-binary :all: --index-url "$TORCH_INDEX" "torch==$pin"
elif [ "$stage" = train ]; then
    # A build of this version that pip is configured to find, such as 2.13.0+cpu in a folder of wheels. pip would prefer
    # it, but not in the mode with hashes: there, it prefers a file whose hash the index states.
    torch=$($pip index versions torch 2>/dev/null | tr ', ' '\n\n' | grep -Fx -m 1 -e "$pin+cpu" || true)
fi
install "$stage" "$torch"
# The CUDA build of torch needs 17 packages more, the CPU build none of them.
if [ "$stage" = train ] && [ "$torch" != none ] && $pip show torch | grep -Eq '^Requires:.*(nvidia|cuda)-'; then
    install cuda
fi
# kmatrix itself. Its dependencies are there; with build isolation, pip would download setuptools without a hash.
$pip install $quiet --no-deps --no-build-isolation --editable .
# pip writes absolute paths to this checkout; with relative ones a copy of the checkout runs its own code.
for path in "$venv"/lib/python*/site-packages/__editable__.kmatrix-*.pth; do
    echo ../../../../lib >"$path"
done
cat >"$venv/bin/kmatrix" <<'SCRIPT'
#!/bin/sh
bin=$(dirname "$0")
[ -f "$bin/../pyvenv.cfg" ] || bin=$(dirname "$(readlink -f "$0")") # called through a link to this file
exec "$bin/python" -P -m kmatrix "$@" # -P: a file kmatrix.py in the current directory is not imported
SCRIPT
# Last: a stage that failed half-way has no mark, and is installed again.
echo "$sum" >"$mark"
echo "setup: $stage is ready"
