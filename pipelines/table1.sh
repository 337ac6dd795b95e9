#!/usr/bin/env bash
# Table 1 of the paper: LLaMA2-7B to 16, 8 and 4 kv heads, seven rows each, on one calibration and one
# teacher.
#
#   bash pipelines/table1.sh            # 21 trainings one after another on 8 GPUs
#   KV=8 bash pipelines/table1.sh       # some of the blocks: KV="16 8 4"
#   V1=1 bash pipelines/table1.sh       # with the epochs of the paper's version 1: 5, 15 and 20
#   FLAGS="--masks l0 --kl-on all" bash pipelines/table1.sh      # masks by Eq. 29 alone, KL on every token
#   FLAGS="--merged-lr-factor 2" bash pipelines/table1.sh        # shared projections' released learning rate
#   SMALL=1 bash pipelines/table1.sh    # the same on the demo model, on two cores
#
# baseline merges adjacent heads as they are, default after alignment; key and value group heads by that
# similarity; cos and dist are the criterion of grouping and of alignment. The other settings are listed in
# pipelines/recipe.sh. Once the first row has made the teacher, rows are independent: ROWS="key-cos key-dist"
# trains only those, on another machine with the same RUN, and evaluates nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
KV=${KV:-16 8 4}
declare -A BUDGET=([16]=11530 [8]=23060 [4]=34590)  # 5, 10 and 15 epochs of 147,580 samples, 64 a step
[ -z "${V1:-}" ] || BUDGET=([16]=11530 [8]=34590 [4]=46119)
NAME=table1${V1:+-v1} MODEL=${MODEL:-meta-llama/Llama-2-7b-hf} HEADS=32 TEACHER_STEPS=2306
source pipelines/recipe.sh
table
