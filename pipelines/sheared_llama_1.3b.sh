#!/usr/bin/env bash
# Sheared-LLaMA-1.3B, 16 heads -> 8 or 4 kv heads, with the published settings (Table 2 and
# Appendix A of the paper).
#
#   bash pipelines/sheared_llama_1.3b.sh                   # 4 kv heads on 8 GPUs
#   KV=8 bash pipelines/sheared_llama_1.3b.sh              # 8 or 4
#   PLAN=8xA100-80GB bash pipelines/sheared_llama_1.3b.sh  # what training will take there; does not train
#   SMALL=1 bash pipelines/sheared_llama_1.3b.sh           # the same on the demo model, minutes on two cores
#
# The other settings are listed in pipelines/recipe.sh. Budgets are 6 and 12 epochs of 147,580 samples at a
# batch of 64; the teacher takes 3 epochs at a batch of 128.
set -euo pipefail
cd "$(dirname "$0")/.."
KV=${KV:-4}
declare -A BUDGET=([8]=13836 [4]=27672)
NAME=sheared-llama-1.3b-gqa$KV MODEL=${MODEL:-princeton-nlp/Sheared-LLaMA-1.3B} HEADS=16 TEACHER_STEPS=3459
source pipelines/recipe.sh

calibrate                                    # minutes on one GPU
convert value-dist "$KV" value dist dist     # grouping and alignment take minutes, training most of the time
evaluate merged="$RUN/value-dist/merged" gqa="$RUN/value-dist/gqa"
