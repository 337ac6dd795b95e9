# Shared by the recipes, which source it after setting NAME, MODEL, HEADS, KV, STEPS and TEACHER_STEPS.
#
#   PYTHON   interpreter (python)             RUN      run directory (runs/NAME)
#   NPROC    training processes (8)           TASKS    directory of task files, or hub (hub)
#   NNODES   nodes (1); all run the same command, with RDZV=host:port and RUN on a disk they share
#   PLAN     e.g. 8xA100-80GB: print the cost of training on that hardware, and stop before training
#   SMALL=1  the same recipe on the demo model, on two cores; SMALL_STEPS and SMALL_TEACHER_STEPS shorten it
#   TEXT     calibration text (c4)            HELDOUT  text for the perplexity (c4)
#   LIMIT    questions per task in the evaluation (all)
#
# Existing results are reused: after an interruption, run the same command.

PYTHON=${PYTHON:-python}
if [ -n "${SMALL:-}" ]; then
  NAME=$NAME-small MODEL=demo KV=$((KV * 8 / HEADS)) NPROC=${NPROC:-2} TASKS=${TASKS:-runs/demo-model/tasks}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  LENGTH=(--print-every 50 ${SMALL_STEPS:+--steps "$SMALL_STEPS"})
  LENGTH+=(${SMALL_TEACHER_STEPS:+--teacher-steps "$SMALL_TEACHER_STEPS"})
  CALIBRATE=(--model demo)
  EVALUATE=(--tasks "$TASKS" ${LIMIT:+--limit "$LIMIT"})
else
  LENGTH=(--steps "$STEPS" --teacher-steps "$TEACHER_STEPS")
  CALIBRATE=(--model "$MODEL" --text "${TEXT:-c4}" --sequences 128 --length 2048)
  EVALUATE=(--tasks "${TASKS:-hub}" --text "${HELDOUT:-c4}" --dtype bfloat16 ${LIMIT:+--limit "$LIMIT"})
fi
RUN=${RUN:-runs/$NAME}

make_once() { [ -e "$1" ] || "${@:2}"; }  # make_once RESULT COMMAND...

train() {
  local nodes=(--standalone)
  if [ "${NNODES:-1}" != 1 ]; then
    nodes=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV" --rdzv-id "$NAME")
  fi
  "$PYTHON" -m torch.distributed.run "${nodes[@]}" --nproc-per-node "${NPROC:-8}" --shutdown-timeout 600 \
    05_prune_train.py "$@"
}

# Stages 1 and 2, shared by all rows.
calibrate() {
  make_once "$RUN/calibration" "$PYTHON" 01_calibrate.py --run "$RUN" "${CALIBRATE[@]}"
  make_once "$RUN/similarity.safetensors" "$PYTHON" 02_similarity.py --run "$RUN"
}

# convert ROW BY CRITERION ROTATE: stages 3 to 6 in RUN/ROW, with RUN's calibration and teacher.
convert() {
  local row=$RUN/$1
  make_once "$row/groups.json" "$PYTHON" 03_group.py --run "$row" \
    --similarity "$RUN/similarity.safetensors" --kv-heads "$KV" --by "$2" --criterion "$3"
  make_once "$row/merged" "$PYTHON" 04_align.py --run "$row" --calibration "$RUN/calibration" --rotate "$4"
  local settings=(--run-dir "$row" --teacher "$RUN/teacher" --tasks "${TASKS:-hub}" --text none
    "${LENGTH[@]}")
  if [ -n "${PLAN:-}" ]; then
    "$PYTHON" 05_prune_train.py "${settings[@]}" --plan "$PLAN"
    exit
  fi
  make_once "$row/train/stage.json" train "${settings[@]}"
  make_once "$row/gqa" "$PYTHON" 06_export.py --run "$row"
}

# evaluate NAME=CHECKPOINT...: one table, the teacher first. Printed again if it already exists.
evaluate() {
  if [ -e "$RUN/eval.md" ]; then cat "$RUN/eval.md"; return; fi
  "$PYTHON" 07_eval.py --run "$RUN" "${EVALUATE[@]}" --model teacher="$RUN/teacher" "$@"
}
