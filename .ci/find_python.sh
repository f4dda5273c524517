#!/bin/sh
# Prints the path of the first of several Pythons that an environment can be made with: CPython (JAX is there for no
# other), new enough, with a venv that works. Usage: sh .ci/find_python.sh <oldest minor version> <python>...
# A name is looked for in every folder of the PATH, not only the first that has it: pyenv's shims of versions that are
# not selected come before interpreters that run. What pyenv has, but has not selected, is looked for last.
set -u
oldest=$1
shift
without_venv=

works() {
    "$1" -c "import sys; sys.exit(sys.version_info < (3, $oldest) or sys.implementation.name != 'cpython')"
} </dev/null >/dev/null 2>&1

# Debian and Ubuntu have ensurepip, without which venv makes an environment without pip, in a package of its own.
has_venv() {
    "$1" -c 'import ensurepip, venv'
} </dev/null >/dev/null 2>&1

for wanted in "$@"; do
    case $wanted in
    */*) places=$wanted ;;
    *) places=$(
        IFS=:
        for folder in $PATH "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin; do printf '%s\n' "$folder/$wanted"; done
    ) ;;
    esac
    found=$(
        printf '%s\n' "$places" | while read -r python; do
            if [ -f "$python" ] && works "$python"; then
                if has_venv "$python"; then printf 'use %s\n' "$python" && break; fi
                printf 'without %s\n' "$python"
            fi
        done
    )
    case $found in
    *'use '*) printf '%s\n' "${found##*use }" && exit 0 ;;
    without*) [ "$without_venv" ] || without_venv=$wanted ;;
    esac
done

if [ "$without_venv" ]; then
    echo "$without_venv is new enough, but its modules venv and ensurepip, which make an environment, are missing" \
        "(on Debian and Ubuntu: apt-get install python3-venv)" >&2
else
    echo "needs CPython 3.$oldest or newer, and none of these runs: $*;" \
        "if there is one elsewhere: make PYTHON=<path>" >&2
fi
exit 1
