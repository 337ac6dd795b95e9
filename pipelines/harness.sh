#!/usr/bin/env bash
# One checkpoint through 07_eval.py and through the standard harness (lm_eval), the same questions: do they
# agree on each?
#
#   bash pipelines/harness.sh CHECKPOINT TASKS      # TASKS: a directory of task files, or hub
#
#   PYTHON   interpreter (python), with lm_eval installed     RUN      where everything goes (runs/harness)
#   ONLY     some of the tasks, e.g. "piqa boolq" (all)       DTYPE    float32, bfloat16 or float16 (float32)
#   LIMIT    questions per task (all)
#
# Prints one line in the end; exits with 2 where they differ.
set -euo pipefail
[ $# = 2 ] || { echo "error: expected CHECKPOINT TASKS, found $# arguments" >&2; exit 2; }
PYTHON=$(command -v "${PYTHON:-python}") CHECKPOINT=$(realpath "$1") TASKS=$2
[ "$TASKS" = hub ] || TASKS=$(realpath "$TASKS")
cd "$(dirname "$0")/.."
RUN=${RUN:-runs/harness}
read -ra ONLY <<< "${ONLY:-}"

"$PYTHON" 07_eval.py --run "$RUN" --model model="$CHECKPOINT" --tasks "$TASKS" --text none --force \
  --dtype "${DTYPE:-float32}" ${LIMIT:+--limit "$LIMIT"} ${ONLY[0]:+--only "${ONLY[@]}"}
"$PYTHON" -m pipelines.harness_tasks --run "$RUN" --output "$RUN/tasks" --force
PATH=$(dirname "$PYTHON"):$PATH bash "$RUN/tasks/lm_eval.sh"
"$PYTHON" -m pipelines.harness_check "$RUN" "$RUN/tasks"
