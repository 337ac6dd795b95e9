#!/usr/bin/env bash
# What needs a GPU, by one command a part; the report of tests is bench/RESULTS-<GPU>.md, that of another part
# bench/RESULTS-<GPU>-PART.md.
#
#   bash pipelines/gpu.sh                 # tests of all stages against the CPU, of training killed and
#                                         # resumed on all GPUs, and benchmarks: some ten minutes on one GPU
#   MODEL=... KV_HEADS=... bash pipelines/gpu.sh record  # pipelines.convert, and what its model can do
#   MODEL=... KV_HEADS=... bash pipelines/gpu.sh refit   # stages 1 to 4 by tokens of calibration, and the KL
#   bash pipelines/gpu.sh 7b              # all but training, of random weights of LLaMA2-7B's shape
#   bash pipelines/gpu.sh 7b-layerwise    # the same, a layer in memory at a time
#   bash pipelines/gpu.sh 7b-refit        # closed form and attention refit of 7b's calibration
#   bash pipelines/gpu.sh 7b-train        # 50 steps with masks, of 8 layers, and what their plan expects
#
#   PYTHON  interpreter (python3) with torch, transformers and pytest: an image's own; nothing is downloaded
#   OUT     logs and results.json (runs/gpu for tests, runs/gpu-PART)
#   LIMIT   seconds for everything (835)
#   WORK    models and runs of parts other than tests, which go on there by the same command (runs/gpu-work)
#   TEXT    what record trains and refit calibrates on, as --text of stage 1 (generated)
#   OTHER   text to measure both on beside it, as --text of stage 7 (demo)
#   FLAGS   more flags of pipelines.convert for record
#   COMMIT  of this source, where there is no repository
#   GPU_TESTS_ON=cpu  tries all of this on a CPU, with small models; the report is OUT/report.md
#
# What is worth most comes first. The limits of tests' rows fit in LIMIT; with a lower one, or where a row of
# another part takes all of it, the last are left out.
# Goes on after a failure. Exits with 1 if anything failed or was left out, with 2 where there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export PART=${1:-tests} PYTHON=${PYTHON:-python3} OTHER=${OTHER:-demo}
OUT=${OUT:-runs/gpu${1:+-$1}}
LIMIT=${LIMIT:-835}
WORK=${WORK:-runs/gpu-work}
DEVICE=${GPU_TESTS_ON:-cuda}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}

case $PART in
  tests | 7b | 7b-layerwise | 7b-refit | 7b-train) ;;
  record | refit) [ -n "${MODEL:-}" ] ||
    { echo "error: MODEL: expected a directory, hub name or .gguf file, found none" >&2; exit 2; } ;;
  *) echo "error: expected tests, record, refit, 7b, 7b-layerwise, 7b-refit or 7b-train, found $PART" >&2
     exit 2 ;;
esac
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

# row NAME SECONDS ARGUMENTS...: run Python with a time limit; its output goes to
# OUT/NAME.log, its exit code and the most memory of the first GPU that was in use, in MiB, to OUT/rows.tsv
row() {
  local name=$1 limit=$2 began=$SECONDS code=0 used=0 watch= command
  shift 2
  printf -v command '%q ' "$@"
  if ((limit > LIMIT - SECONDS)) || [[ $DEVICE == cpu ]]; then limit=$((LIMIT - SECONDS)); fi
  if ((limit > 0)); then
    echo "$name: $command"
    if command -v nvidia-smi > /dev/null; then
      nvidia-smi -i 0 -l 1 --query-gpu=memory.used --format=csv,noheader,nounits > "$OUT/$name.mib" &
      watch=$!
    fi
    timeout -k 10 "$limit" "$PYTHON" "$@" > "$OUT/$name.log" 2>&1 || code=$?
    [ -z "$watch" ] || { kill "$watch"; used=$(sort -n "$OUT/$name.mib" | tail -n 1); }
  else
    code=left-out
    : > "$OUT/$name.log"
  fi
  printf '%s\t' "$name" "$code" "$((SECONDS - began))" "${used:-0}" >> "$OUT/rows.tsv"
  printf '%s\n' "${command% }" >> "$OUT/rows.tsv"
}

tests() {
  local pytest="-m pytest -o addopts= -o faulthandler_timeout=100 -p no:cacheprovider -v -ra --tb=short"
  local step="-m bench.train_step --device $DEVICE --batch 64 --pairs 3 --singles 4"
  local layer="--heads 32 --kv-heads 8 --head-dim 128 --intermediate 11008 --layers 4"  # of 7B proportions
  local dtype="--dtype bfloat16" cells="--contexts 2048 8192 --batches 1 16" wide="--hidden 4096"
  local large="--shape 1.3b" larger="--shape 7b --layers 8"
  local packed="--tokens-per-microbatch 8192" short="--tokens-per-microbatch 1024 --batch 32"
  local long="--tokens-per-microbatch 16384 --batch 128" generating="--shape smollm2"
  local transform="$layer --tokens 65536 --head-pairs 20 --calibrate-tokens 8192"
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
}

record() {
  local run=$WORK/record source trained lengths=
  [[ $DEVICE != cpu ]] || lengths="--lengths 200"
  row convert "$LIMIT" -m pipelines.convert --run "$run" --model "$MODEL" \
    ${KV_HEADS:+--kv-heads "$KV_HEADS"} --text "${TEXT:-generated}" ${FLAGS:-}
  source=$("$PYTHON" -m pipelines.source "$run") || return 0
  trained=("merged=$run/merged" "trained=$run/gqa")
  row other 120 07_eval.py --run "$WORK/other" --update --tasks none --text "$OTHER" \
    --model "source=$source" "${trained[@]}"
  row answers 120 -m bench.answers --out "$OUT" --models "source=$source" "${trained[@]}"
  row retrieval 120 -m bench.retrieval --out "$OUT" --source "$source" --models "${trained[@]}" \
    --text "$OTHER" $lengths
}

refit() {
  local sizes="64 256 1024 4096" length=2048 calibrated=${TEXT:-generated}  # 0.13 to 8 M tokens
  local source size text run models=()
  [[ $DEVICE != cpu ]] || sizes="8 16" length=128
  for size in $sizes; do
    run=$WORK/refit-$size
    row "calibrate-$size" "$LIMIT" 01_calibrate.py --run "$run" --model "$MODEL" --text "$calibrated" \
      --sequences "$size" --length "$length"
    row "similarity-$size" "$LIMIT" 02_similarity.py --run "$run" --energy
    row "group-$size" "$LIMIT" 03_group.py --run "$run" --by energy ${KV_HEADS:+--kv-heads "$KV_HEADS"}
    row "align-$size" "$LIMIT" 04_align.py --run "$run" --merge closed-form --refit attention
    models+=("$size=$run/merged")
  done
  source=$("$PYTHON" -m pipelines.source "$WORK/refit-$size") || return 0
  for text in "$WORK/refit-$size/calibration" "$OTHER"; do
    row "kl-of-$(basename "$text" | tr -c '[:alnum:]\n' _)" 120 07_eval.py --run "$WORK/refits" --update \
      --tasks none --text "$text" --model "source=$source" "${models[@]}"
  done
}

# random_7b [LAYERS]: a model in WORK, of LLaMA2-7B's 32 layers or of fewer; sets model, run and text, and
# removes the checkpoints of other parts, since a disk may not hold them all
random_7b() {
  local shape="--shape 7b --device $DEVICE" layers=${1:+--layers $1} other
  model=$WORK/model-${1:-32} run=$WORK/$PART text="--text demo --sequences 128 --length 2048"
  if [[ $DEVICE == cpu ]]; then shape="--shape demo" layers="--layers 2" text="--text demo --sequences 8"; fi
  for other in "$WORK"/7b*/; do
    [[ $other -ef $run ]] || rm -rf "$other"/{aligned,merged,gqa-merged,train}
  done
  [ -d "$model" ] || row model 120 -m bench.random_model $shape $layers --out "$model"
}

7b() {  # the paper's road, for 7b-layerwise with that flag
  local model run text layerwise=${1:-}
  random_7b
  row calibrate  "$LIMIT" 01_calibrate.py --run "$run" --model "$model" $text $layerwise
  row similarity "$LIMIT" 02_similarity.py --run "$run"
  row group      "$LIMIT" 03_group.py --run "$run"
  row align      "$LIMIT" 04_align.py --run "$run" $layerwise
  row export     "$LIMIT" 06_export.py --run "$run" --untrained --name merged
  row evaluate   "$LIMIT" 07_eval.py --run "$run" --tasks none --text demo --sequences 8 $layerwise \
    --model "source=$model" "gqa=$run/gqa-merged"
}

7b-layerwise() { 7b --layerwise; }

7b-refit() {
  local model run text calibration
  random_7b
  calibration="--calibration $WORK/7b/calibration"
  row similarity "$LIMIT" 02_similarity.py --run "$run" $calibration --energy
  row group      "$LIMIT" 03_group.py --run "$run" --by energy
  row align      "$LIMIT" 04_align.py --run "$run" $calibration --merge closed-form --refit attention
}

7b-train() {  # all weights of 32 layers would need more than 80 GB
  local model run text train plan=1xH100-80GB
  rm -rf "$WORK"/{7b,7b-layerwise,7b-refit,model-32}  # checkpoints of a training need the disk, too
  random_7b 8
  train="--tasks none --text demo --masks l0-released --batch 64 --steps 62"  # four fifths of them with masks
  if [[ $DEVICE == cpu ]]; then plan=1xCPU train+=" --text-tokens 20000 --batch 4"; fi
  row calibrate  "$LIMIT" 01_calibrate.py --run "$run" --model "$model" $text
  row similarity "$LIMIT" 02_similarity.py --run "$run"
  row group      "$LIMIT" 03_group.py --run "$run"
  row align      "$LIMIT" 04_align.py --run "$run"
  row plan       "$LIMIT" -m pipelines.plan --run "$run" --on "$plan" $train
  row train      "$LIMIT" 05_prune_train.py --run "$run" $train
}

"$PART"
"$PYTHON" -m bench.gpu report "$OUT"
