# Sourced by the scripts beside it: find a Python, make .venv ready, say how long each step took.
# Bash 5, that Python and coreutils are all it needs.

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# .venv is the whole environment: nothing of another one is mixed in.
unset PYTHONHOME PYTHONPATH

# Set $python to $PYTHON, else to the first of python3, python3.13, python3.12 and python3.11 that is new enough and can
# make a virtual environment. Otherwise one line says what was found and what to install.
find_python() {
    local candidate answer list package=python3-venv
    local -a candidates=(python3 python3.13 python3.12 python3.11) found=()
    if [[ -n ${PYTHON:-} ]]; then
        candidates=("$PYTHON")
    fi
    # Every Python must understand this, 2 included. Debian has venv, but not ensurepip, until python3-venv is installed.
    local question='
import sys
version = "%d.%d.%d" % sys.version_info[:3]
if sys.version_info < (3, 11):
    sys.exit(print(version + " (too old)") or 1)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(print(version + " (cannot make a virtual environment)") or 1)
print(version)'
    for candidate in "${candidates[@]}"; do
        if answer=$("$candidate" -E -s -c "$question" 2>/dev/null </dev/null); then
            python=$candidate
            return 0
        fi
        if [[ $answer == *"virtual environment"* ]]; then
            package=${answer%% *}
            package=python${package%.*}-venv
        fi
        found+=("$candidate ${answer:-was not found}")
    done
    printf -v list '%s, ' "${found[@]}"
    printf 'no Python 3.11 or later that can make a virtual environment: %s; on Debian: apt install %s, or set PYTHON to one\n' \
        "${list%, }" "$package" >&2
    return 1
}

# prepare EXTRA...: make .venv hold this project and those extras; afterwards $python is its Python.
prepare() {
    find_python
    "$python" -I -B "$root/scripts/environment.py" "$@"
    python=$root/.venv/bin/python
}

# step NAME COMMAND...: one line with the time it took; what the command wrote is shown only if it failed.
step() {
    local name=$1 began=${EPOCHREALTIME/[.,]/} output status=0
    shift
    output=$("$@" 2>&1 </dev/null) || status=$?
    local tenths=$(((${EPOCHREALTIME/[.,]/} - began + 50000) / 100000))
    if ((status == 0)); then
        printf '%-44s %6s s\n' "$name" "$((tenths / 10)).$((tenths % 10))"
    else
        printf '%s failed:\n%s\n' "$name" "$output"
    fi
    return "$status"
}
