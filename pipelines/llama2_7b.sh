#!/usr/bin/env bash
# LLaMA2-7B, 32 heads -> 16, 8 or 4 kv heads, with the published settings (Section 4.1 and
# Appendix A of the paper).
#
#   bash pipelines/llama2_7b.sh                   # 8 kv heads on 8 GPUs
#   KV=16 bash pipelines/llama2_7b.sh             # 16, 8 or 4
#   PLAN=8xA100-80GB bash pipelines/llama2_7b.sh  # what training will take there; does not train
#   SMALL=1 bash pipelines/llama2_7b.sh           # the same on the demo model, minutes on two cores
#
# The other settings are listed in pipelines/recipe.sh. Budgets are 5, 10 and 15 epochs of 147,580 samples
# at a batch of 64; the teacher takes 2 epochs at a batch of 128.
set -euo pipefail
cd "$(dirname "$0")/.."
KV=${KV:-8}
declare -A BUDGET=([16]=11530 [8]=23060 [4]=34590)
NAME=llama2-7b-gqa$KV MODEL=${MODEL:-meta-llama/Llama-2-7b-hf} HEADS=32 TEACHER_STEPS=2306
source pipelines/recipe.sh

calibrate                                    # minutes on one GPU
convert value-dist "$KV" value dist dist     # grouping and alignment take minutes, training hours (PLAN)
evaluate merged="$RUN/value-dist/merged" gqa="$RUN/value-dist/gqa"
