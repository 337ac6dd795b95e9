#!/usr/bin/env bash
# All that needs a GPU, by one command and in some ten minutes on one: the GPU tests (stages 1 to 7 against
# the CPU; stage 5 on all GPUs, killed and resumed) and the benchmarks. The report is bench/RESULTS-<GPU>.md.
#
#   PYTHON  interpreter (python3) with torch, transformers and pytest: an image's own; nothing is downloaded
#   OUT     logs and results.json (runs/gpu)         LIMIT  seconds for everything (835)
#   COMMIT  of this source, where there is no repository
#   GPU_TESTS_ON=cpu  tries all of this on a CPU, with small models; the report is OUT/report.md
#
# What is worth most comes first; the rows' limits fit in LIMIT, and with a lower one the last are left out.
# Goes on after a failure. Exits with 1 if anything failed or was left out, with 2 where there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/gpu}
LIMIT=${LIMIT:-835}
DEVICE=${GPU_TESTS_ON:-cuda}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}

for package in torch transformers pytest; do
  "$PYTHON" -c "import $package" 2> /dev/null ||
    { echo "error: $PYTHON: expected the package $package, found none" >&2; exit 2; }
done
"$PYTHON" -m bench.gpu check || exit 2
mkdir -p "$OUT"
[[ -f $OUT/rows.tsv || -z $(ls -A "$OUT") ]] || {
  echo "error: OUT=$OUT: expected an empty directory or an earlier report's, found other files" >&2
  exit 2
}
rm -f "$OUT/results.json"
: > "$OUT/rows.tsv"

# row NAME SECONDS ARGUMENTS...: run Python with a time limit; its output goes to OUT/NAME.log, its exit code
# to OUT/rows.tsv
row() {
  local name=$1 limit=$2 began=$SECONDS code=0
  shift 2
  if ((limit > LIMIT - SECONDS)) || [[ $DEVICE == cpu ]]; then limit=$((LIMIT - SECONDS)); fi
  if ((limit > 0)); then
    echo "$name: $*"
    timeout -k 10 "$limit" "$PYTHON" "$@" > "$OUT/$name.log" 2>&1 || code=$?
  else
    code=left-out
    : > "$OUT/$name.log"
  fi
  printf '%s\t%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - began))" "$*" >> "$OUT/rows.tsv"
}

pytest="-m pytest -o addopts= -o faulthandler_timeout=100 -p no:cacheprovider -v -ra --tb=short"
step="-m bench.train_step --device $DEVICE --batch 64 --pairs 3 --singles 4"
layer="--heads 32 --kv-heads 8 --head-dim 128 --intermediate 11008 --layers 4"  # of 7B proportions
dtype="--dtype bfloat16" cells="--contexts 2048 8192 --batches 1 16" wide="--hidden 4096"
large="--shape 1.3b" larger="--shape 7b --layers 8"
packed="--tokens-per-microbatch 8192" short="--tokens-per-microbatch 1024 --batch 32"
long="--tokens-per-microbatch 16384 --batch 128" generating="--shape smollm2"
transform="$layer --tokens 65536 --head-pairs 20 --calibrate-tokens 8192"
if [[ $DEVICE == cpu ]]; then
  layer="--heads 8 --kv-heads 2 --head-dim 8 --intermediate 64 --layers 2"
  dtype="" cells="--contexts 64 --batches 1" wide="--tokens 1024 --vocab 4000"
  large="--shape demo --layers 2" larger=$large
  packed="" short="--tokens-per-microbatch 256" long="--tokens-per-microbatch 4096"
  transform="$layer --tokens 512 --calibrate-tokens 512" generating="--length 64 --rows 8"
fi
row tests       180 $pytest tests/stages/test_gpu.py
row generating   45 -m bench.generating --device $DEVICE $generating
row short-rows   60 $step $large $short
row by-layer     60 $step $large $short --by-layer
row step-1.3b    60 $step $large $packed
row step-7b      50 $step $larger $packed
row long-rows    50 $step $large $long
row decode       40 -m bench.decode --device $DEVICE $layer $dtype $cells
row loss         20 -m bench.loss --device $DEVICE $dtype $wide
row compiled     95 $step $large $packed --compile
row short-compiled 60 $step $large $short --compile
row transform    95 -m bench.transform --device $DEVICE $transform $dtype --threads "$OMP_NUM_THREADS"

"$PYTHON" -m bench.gpu report "$OUT"
