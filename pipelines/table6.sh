#!/usr/bin/env bash
# Table 6 of the paper: seconds of calibration and transformation, with grouping and without, to 16, 8 and 4
# kv heads. Trains nothing.
#
#   bash pipelines/table6.sh                                           # LLaMA2-7B, on one GPU
#   RUN=runs/table6-1.3b MODEL=princeton-nlp/Sheared-LLaMA-1.3B HEADS=16 KV="8 4" bash pipelines/table6.sh
#   SMALL=1 bash pipelines/table6.sh                                   # the demo model, minutes on two cores
#
# Grouping is that by value and distance. The other settings are listed in pipelines/recipe.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
KV=${KV:-16 8 4}
declare -A BUDGET=([16]=0 [8]=0 [4]=0)  # steps: nothing is trained
NAME=table6 MODEL=${MODEL:-meta-llama/Llama-2-7b-hf} HEADS=${HEADS:-32} TEACHER_STEPS=0
source pipelines/recipe.sh

calibrate
for kv in $KV; do
  transform "gqa$kv-grouped" "$kv" value dist dist
  transform "gqa$kv-default" "$kv" none dist dist
done
"$PYTHON" -m pipelines.table6 --run "$RUN" --kv-heads $KV  # one word per number
