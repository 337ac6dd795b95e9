#!/usr/bin/env bash
# One block of the paper's Table 1: the seven ways to regroup and rotate LLaMA2-7B's heads, one calibration, one teacher.
#
#   bash pipelines/table1.sh            # 8 kv heads (KV=16|8|4), seven trainings one after another
#   SMALL=1 bash pipelines/table1.sh    # the same on the embedded model, some ten minutes on two cores
#
# baseline prunes with no transformation; default merges adjacent heads; key and value regroup by that similarity; cos and
# dist are the criteria of grouping and of alignment. pipelines/recipe.sh lists the settings. Rows are independent once the
# first has made the teacher: ROWS="key-cos key-dist" trains only those, on another machine with the same RUN.
set -euo pipefail
cd "$(dirname "$0")/.."
KV=${KV:-8}
declare -A BUDGET=([16]=11530 [8]=23060 [4]=34590)
[ -n "${BUDGET[$KV]:-}" ] || { echo "error: KV: expected 16, 8 or 4, found $KV" >&2; exit 2; }
NAME=table1-gqa$KV MODEL=${MODEL:-meta-llama/Llama-2-7b-hf} HEADS=32 STEPS=${BUDGET[$KV]} TEACHER_STEPS=2306
source pipelines/recipe.sh
ALL="baseline default-cos default-dist key-cos key-dist value-cos value-dist"

calibrate
for row in ${ROWS:-$ALL}; do
  case $row in
    baseline)  convert "$row" none dist none ;;
    default-*) convert "$row" none "${row#*-}" "${row#*-}" ;;
    *-*)       convert "$row" "${row%-*}" "${row#*-}" "${row#*-}" ;;
  esac
done
[ -n "${ROWS:-}" ] || evaluate $(for row in $ALL; do echo "$row=$RUN/$row/gqa"; done)
