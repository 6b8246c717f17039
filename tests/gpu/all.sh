#!/bin/bash
# What is run on a GPU for one backend: bash tests/gpu/all.sh jax|torch|tensorflow OUT
# Small and quick parts first, so that a run that is cut short leaves results.
out=$2
export KERAS_BACKEND=$1 PYTHONUNBUFFERED=1 PYTHONPATH=src:$PYTHONPATH TF_CPP_MIN_LOG_LEVEL=2
quiet() { grep -vE '^[WIEF][0-9]{4} |^WARNING|UserWarning|data_adapter' | cut -c1-600; }
oom() { timeout "$1" python tests/gpu/real_oom.py --out "$out/real_oom_$2.json" "${@:3}" 2>&1 | quiet | grep -E 'difference|out_of|pulled|failed|told|rror' ; }
step() { timeout "$1" python benchmarks/step.py --device gpu --name "$2" "${@:3}" 2>&1 | quiet | grep -E '^(first|\{| +\{)|rror'; cp "benchmarks/results/$2.json" "$out/"; }
case $1 in
jax)
  oom 220 jax --caps 3000 --recoveries 50
  step 110 step-gpu-jax --parts whole-conv,whole-transformer
  step 120 step-gpu-jax-pieces --parts pieces-conv,pieces-transformer --pieces 1,4,16
  oom 110 jax_blind --caps "" --recoveries 3 --blind ;;
torch)
  step 60 step-gpu-torch --parts whole-conv,whole-transformer
  step 60 step-gpu-torch-pieces --parts pieces-conv,pieces-transformer --pieces 1,4,16
  oom 120 torch --caps 6000,3000 --recoveries 50 ;;
tensorflow)
  oom 220 tensorflow_graph --jit no --caps 3000 --recoveries 5
  TF_GPU_ALLOCATOR=cuda_malloc_async oom 40 tensorflow_async --jit no --caps "" --recoveries 2
  oom 200 tensorflow_xla --jit yes --net tokens --caps 3000 --recoveries 5
  step 80 step-gpu-tensorflow-graph --jit no --parts whole-conv,whole-transformer
  step 170 step-gpu-tensorflow-xla --jit yes --parts whole-transformer,pieces-transformer --pieces 1,4 ;;
esac
