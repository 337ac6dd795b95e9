#!/usr/bin/env bash
# One block of the paper's Table 1: seven ways to group and rotate LLaMA2-7B's heads, with one calibration and
# one teacher.
#
#   bash pipelines/table1.sh            # 8 kv heads (KV=16|8|4), seven trainings one after another
#   SMALL=1 bash pipelines/table1.sh    # the same on the demo model, about ten minutes on two cores
#
# baseline merges adjacent heads as they are, default after alignment; key and value group heads by that
# similarity; cos and dist are the criterion of grouping and of alignment. The other settings are listed in
# pipelines/recipe.sh. Once the first row has made the teacher, rows are independent:
# ROWS="key-cos key-dist" trains only those, on another machine with the same RUN.
set -euo pipefail
cd "$(dirname "$0")/.."
KV=${KV:-8}
declare -A BUDGET=([16]=11530 [8]=23060 [4]=34590)
[ -n "${BUDGET[$KV]:-}" ] || { echo "error: KV: expected 16, 8 or 4, found $KV" >&2; exit 2; }
NAME=table1-gqa$KV MODEL=${MODEL:-meta-llama/Llama-2-7b-hf} HEADS=32
STEPS=${BUDGET[$KV]} TEACHER_STEPS=2306
source pipelines/recipe.sh
ALL="baseline default-cos default-dist key-cos key-dist value-cos value-dist"
read -ra rows <<< "${ROWS:-$ALL}"
for row in "${rows[@]}"; do
  [[ " $ALL " = *" $row "* ]] || { echo "error: ROWS: expected some of $ALL, found $row" >&2; exit 2; }
done

calibrate
checkpoints=()
for row in "${rows[@]}"; do
  case $row in
    baseline)  convert "$row" none dist none ;;
    default-*) convert "$row" none "${row#*-}" "${row#*-}" ;;
    *)         convert "$row" "${row%-*}" "${row#*-}" "${row#*-}" ;;
  esac
  checkpoints+=("$row=$RUN/$row/gqa")
done
[ -n "${ROWS:-}" ] || evaluate "${checkpoints[@]}"
