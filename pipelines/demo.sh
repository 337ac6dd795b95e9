#!/usr/bin/env bash
# The whole method on the demo model, 8 heads -> 2 kv heads, and the mean-pooling baseline with the same
# budget: minutes on two cores. PYTHON is the interpreter, RUN the run directory. A stage that is complete is
# not run again.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RUN=${RUN:-runs/demo}
POOL=$RUN/meanpool
train() {
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 05_prune_train.py --print-every 20 "$@"
}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # two training processes share two cores
export CUDA_VISIBLE_DEVICES=  # and need none of what GPUs there are

# the aligned student
"$PYTHON" 01_calibrate.py --run "$RUN"
"$PYTHON" 02_similarity.py --run "$RUN"
"$PYTHON" 03_group.py --run "$RUN"
"$PYTHON" 04_align.py --run "$RUN"
train --run-dir "$RUN"
"$PYTHON" 06_export.py --run "$RUN"

# the baseline: adjacent heads, no rotation; the same calibration, teacher and number of steps
"$PYTHON" 03_group.py --run "$POOL" --similarity "$RUN/similarity" --by none
"$PYTHON" 04_align.py --run "$POOL" --calibration "$RUN/calibration" --rotate none
train --run-dir "$POOL" --teacher "$RUN/teacher"
"$PYTHON" 06_export.py --run "$POOL"

"$PYTHON" 07_eval.py --run "$RUN" --update --model teacher="$RUN/teacher" \
  mean-pool-untrained="$POOL/merged" aligned-untrained="$RUN/merged" mean-pool="$POOL/gqa" aligned="$RUN/gqa"
"$PYTHON" pipelines/report.py --run "$RUN"
