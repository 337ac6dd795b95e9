#!/usr/bin/env bash
# Table 2 of the paper: Sheared-LLaMA-1.3B to 8 and 4 kv heads, seven rows each, on one calibration and one
# teacher.
#
#   bash pipelines/table2.sh            # 14 trainings one after another on 8 GPUs
#   KV=4 bash pipelines/table2.sh       # one of the blocks: KV="8 4"
#   SMALL=1 bash pipelines/table2.sh    # the same on the demo model, on two cores
#
# The rows are those of pipelines/table1.sh; ROWS="key-cos key-dist" trains only those and evaluates nothing. The
# other settings are listed in pipelines/recipe.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
KV=${KV:-8 4}
declare -A BUDGET=([8]=13836 [4]=27672)  # 6 and 12 epochs of 147,580 samples, 64 a step; the teacher: 3
NAME=table2 MODEL=${MODEL:-princeton-nlp/Sheared-LLaMA-1.3B} HEADS=16 TEACHER_STEPS=3459
source pipelines/recipe.sh
table
