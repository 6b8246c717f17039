#!/bin/bash
# Unseen models on a GPU, each answer kept as it comes: bash benchmarks/unseen_gpu.sh BACKEND SEED OUT [more of unseen.py's]
# `python benchmarks/unseen.py --read OUT/… --machine OUT/environment.json` sums them up elsewhere.
backend=$1 seed=$2 out=$3
export KERAS_BACKEND=$backend PYTHONUNBUFFERED=1 PYTHONPATH=src:$PYTHONPATH TF_CPP_MIN_LOG_LEVEL=3
mkdir -p "$out"
python benchmarks/unseen.py --device gpu --seed "$seed" --out "$out/unseen-$backend-$seed.jsonl" "${@:4}"
