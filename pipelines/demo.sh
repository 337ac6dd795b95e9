#!/usr/bin/env bash
# The whole method on the demo model, 8 heads -> 2 kv heads, and the mean-pooling baseline with the same
# budget: minutes on two cores. PYTHON is the interpreter, RUN the run directory. Existing results are reused.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RUN=${RUN:-runs/demo}
POOL=$RUN/meanpool
train() {
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 05_prune_train.py --print-every 20 "$@"
}
source pipelines/functions.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # two training processes share two cores
export CUDA_VISIBLE_DEVICES=  # and need none of what GPUs there are

# the aligned student
make_once "$RUN/calibration"            "$PYTHON" 01_calibrate.py --run "$RUN"
make_once "$RUN/similarity.safetensors" "$PYTHON" 02_similarity.py --run "$RUN"
make_once "$RUN/groups.json"            "$PYTHON" 03_group.py --run "$RUN"
make_once "$RUN/merged"                 "$PYTHON" 04_align.py --run "$RUN"
make_once "$RUN/train/stage.json"       train --run-dir "$RUN"
make_once "$RUN/gqa"                    "$PYTHON" 06_export.py --run "$RUN"

# the baseline: adjacent heads, no rotation; the same calibration, teacher and number of steps
make_once "$POOL/groups.json" \
  "$PYTHON" 03_group.py --run "$POOL" --similarity "$RUN/similarity.safetensors" --by none
make_once "$POOL/merged" \
  "$PYTHON" 04_align.py --run "$POOL" --calibration "$RUN/calibration" --rotate none
make_once "$POOL/train/stage.json" train --run-dir "$POOL" --teacher "$RUN/teacher"
make_once "$POOL/gqa"              "$PYTHON" 06_export.py --run "$POOL"

"$PYTHON" 07_eval.py --run "$RUN" --force --model teacher="$RUN/teacher" \
  mean-pool-untrained="$POOL/merged" aligned-untrained="$RUN/merged" mean-pool="$POOL/gqa" aligned="$RUN/gqa"
"$PYTHON" -m common.reporting.report --run "$RUN"
