#!/bin/sh
# The demo: the same commands one would type, shown as they run. Usage: sh experiments/demo.sh [folder with pd]
set -eu
cd "$(dirname "$0")/.."
PATH="$(cd "${1:-.venv/bin}" && pwd):$PATH"

run() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
}

[ -f data/demo/meta.json ] || run pd data tokenize --stdlib --out data/demo --seq-len 64
run pd pretrain configs/demo/pretrain.yaml
run pd train configs/demo/decompose.yaml
