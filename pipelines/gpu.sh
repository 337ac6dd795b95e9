#!/usr/bin/env bash
# All that needs a GPU, by one command and in less than nine minutes on one: the GPU tests (stages 1 to 7
# against the CPU; stage 5 on all GPUs, killed and resumed) and the benchmarks. The report is
# bench/RESULTS-DEVICE.md.
#
#   PYTHON  interpreter (python3) with torch, transformers and pytest: an image's own; nothing is downloaded
#   OUT     logs and results.json (runs/gpu)         LIMIT  seconds for everything (520)
#   COMMIT  of this source, where there is no repository
#
# Goes on after a failure. Exits with 1 if anything failed, with 2 where there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/gpu}
LIMIT=${LIMIT:-520}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}

for package in torch transformers pytest; do
  "$PYTHON" -c "import $package" 2> /dev/null ||
    { echo "error: $PYTHON: expected the package $package, found none" >&2; exit 2; }
done
"$PYTHON" -m bench.gpu check || exit 2
mkdir -p "$OUT"
[[ -f $OUT/rows.tsv || -z $(ls -A "$OUT") ]] ||
  { echo "error: OUT=$OUT: expected an empty directory or an earlier report's, found other files" >&2; exit 2; }
rm -f "$OUT/results.json"
: > "$OUT/rows.tsv"

# row NAME SECONDS ARGUMENTS...: run Python with a time limit; its output goes to OUT/NAME.log, its exit code
# to OUT/rows.tsv
row() {
  local name=$1 limit=$2 began=$SECONDS code=0
  shift 2
  if ((limit > LIMIT - SECONDS)); then limit=$((LIMIT - SECONDS)); fi
  echo "$name: $*"
  if ((limit > 0)); then
    timeout -k 10 "$limit" "$PYTHON" "$@" > "$OUT/$name.log" 2>&1 || code=$?
  else
    code=124
    echo "no time left" > "$OUT/$name.log"
  fi
  printf '%s\t%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - began))" "$*" >> "$OUT/rows.tsv"
}

pytest="-m pytest -o addopts= -o faulthandler_timeout=100 -p no:cacheprovider -v -ra --tb=short"
step="-m bench.train_step --device cuda --tokens-per-microbatch 8192 --pairs 3"
layer="--heads 32 --kv-heads 8 --head-dim 128 --intermediate 11008 --layers 4"  # of 7B proportions
row tests     300 $pytest tests/stages/test_gpu.py
row step-1.3b  80 $step --shape 1.3b --batch 64
row step-7b    80 $step --shape 7b --layers 8 --batch 64
row transform  60 -m bench.transform --device cuda $layer --threads "$OMP_NUM_THREADS" --tokens 65536 \
                  --head-pairs 20 --calibrate-tokens 8192 --dtype bfloat16
row decode     60 -m bench.decode --device cuda $layer --dtype bfloat16 --contexts 2048 8192 --batches 1 16
row loss       40 -m bench.loss --device cuda --dtype bfloat16 --hidden 4096
row compiled  120 $step --shape 1.3b --batch 64 --compile

"$PYTHON" -m bench.gpu report "$OUT"
