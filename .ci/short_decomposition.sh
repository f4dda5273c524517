#!/bin/sh
# The demo in a minute or two: its own commands with a handful of steps, in a folder that is removed afterwards. What it
# finds means nothing; that it ends says that everything from text to report works with the packages installed.
# Usage: sh .ci/short_decomposition.sh [folder with pd]
set -eu
cd "$(dirname "$0")/.."
PATH="$(cd "${1:-.venv/bin}" && pwd):$PATH"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM

# Programs that run for seconds need no optimising.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
export JAX_PLATFORMS=cpu

run() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
}

run pd data tokenize README.md docs/*.md --bpe 512 --out "$folder/data" --seq-len 64
sed -e "s|^data:.*|data: $folder/data|" -e "s|^out:.*|out: $folder/target|" -e 's|^steps:.*|steps: 8|' \
    -e 's|^eval:.*|eval: {every: 8, batches: 2}|' configs/demo/pretrain.yaml >"$folder/pretrain.yaml"
run pd pretrain "$folder/pretrain.yaml"
set -- configs/demo/decompose.yaml --set "target.folder=$folder/target" --set "data.train=$folder/data/train" \
    --set "data.eval=$folder/data/eval" --set "out_dir=$folder/runs" --set run_id=p-00000001 \
    --set pd.steps=4 --set pd.faithfulness_warmup_steps=2 --set cadence.save_every=2 \
    --set 'eval.metrics=[{type: CI_L0, groups: null}, {type: CEandKLLosses, rounding_threshold: 0.0}]'
run pd check "$@"
run pd train "$@"
run pd runs "$folder/runs"
run pd report "$folder/runs/p-00000001"
