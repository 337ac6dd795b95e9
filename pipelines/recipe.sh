# Shared by the recipes, which source it after setting NAME, MODEL, HEADS, KV and TEACHER_STEPS, and BUDGET:
# the published number of kv heads -> training steps.
#
#   PYTHON   interpreter (python)             RUN      run directory (runs/NAME)
#   NPROC    training processes (8)           TASKS    directory of task files, or hub (hub)
#   PLAN     e.g. 8xA100-80GB: only print what all of it would cost there, on the published training sets
#   FLAGS    further options of stage 5, separated by blanks: FLAGS="--masks l0 --kl-on all" has masks move
#            by Eq. 29 alone and KL on every token, FLAGS="--merged-lr-factor 2" shared projections train at
#            the learning rate of the released code. They are part of RUN's default name
#   TEACHER  fine-tuned teacher, made if it is not there (RUN/teacher); share it between FLAGS
#   SMALL=1  the same recipe on the demo model, on two cores; SMALL_STEPS and SMALL_TEACHER_STEPS shorten it
#   TEXT     calibration text (c4)            HELDOUT  text for the perplexity (c4)
#   LIMIT    questions per task in the evaluation (all)
#
# As in the authors' code, calibration and evaluation begin sequences with the BOS token, as Llama's tokenizer
# does, and training does not.
#
# A stage that is complete is not run again: after an interruption, run the same command.

PYTHON=${PYTHON:-python}
TABLE_ROWS="baseline default-cos default-dist key-cos key-dist value-cos value-dist"
for kv in $KV; do
  [ -n "${BUDGET[$kv]:-}" ] || { echo "error: KV: expected some of ${!BUDGET[*]}, found $kv" >&2; exit 2; }
done
if [ -n "${SMALL:-}" ]; then
  NAME=$NAME-small MODEL=demo NPROC=${NPROC:-2} TASKS=${TASKS:-runs/demo-model/tasks}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=
  CALIBRATE=(--model demo)
  EVALUATE=(--tasks "$TASKS")
else
  CALIBRATE=(--model "$MODEL" --text "${TEXT:-c4}" --sequences 128 --length 2048)
  EVALUATE=(--tasks "${TASKS:-hub}" --text "${HELDOUT:-c4}" --dtype bfloat16)
fi
EVALUATE+=(${LIMIT:+--limit "$LIMIT"})
read -ra STAGE_5 <<< "${FLAGS:-}"
RUN=${RUN:-runs/$NAME${FLAGS:+_${FLAGS//[ \/]/_}}}
TEACHER=${TEACHER:-$RUN/teacher}

train() {
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-8}" --shutdown-timeout 600 \
    05_prune_train.py "$@" ||
    { echo "training ended early: its last checkpoint is kept, and the same command goes on" >&2; return 1; }
}

# Stages 1 and 2, shared by all table rows.
calibrate() {
  [ -z "${PLAN:-}" ] || return 0
  "$PYTHON" 01_calibrate.py --run "$RUN" "${CALIBRATE[@]}"
  "$PYTHON" 02_similarity.py --run "$RUN"
}

# scaled KV_HEADS: as many; with SMALL, the same share of the demo model's 8.
scaled() {
  if [ -n "${SMALL:-}" ]; then echo $(($1 * 8 / HEADS)); else echo "$1"; fi
}

# transform ROW KV_HEADS BY CRITERION ROTATE: stages 3 and 4 in RUN/ROW, on RUN's calibration.
transform() {
  local row=$RUN/$1 kv_heads
  kv_heads=$(scaled "$2")
  "$PYTHON" 03_group.py --run "$row" \
    --similarity "$RUN/similarity" --kv-heads "$kv_heads" --by "$3" --criterion "$4"
  "$PYTHON" 04_align.py --run "$row" --calibration "$RUN/calibration" --rotate "$5" --merge mean
}

# convert: as transform, then stages 5 and 6 with the one TEACHER.
convert() {
  local row=$RUN/$1 length=(--steps "${BUDGET[$2]}" --teacher-steps "$TEACHER_STEPS")
  if [ -n "${SMALL:-}" ]; then
    length=(--print-every 50 ${SMALL_STEPS:+--steps "$SMALL_STEPS"}
      ${SMALL_TEACHER_STEPS:+--teacher-steps "$SMALL_TEACHER_STEPS"})
  fi
  local tasks=${PLAN:+hub}  # a plan counts the published ones
  local settings=(--teacher "$TEACHER" --tasks "${tasks:-${TASKS:-hub}}" --text none --no-bos "${length[@]}"
    "${STAGE_5[@]}")
  if [ -n "${PLAN:-}" ]; then
    "$PYTHON" -m pipelines.plan --on "$PLAN" --model "$MODEL" --kv-heads "$(scaled "$2")" "${settings[@]}"
    return
  fi
  transform "$@"
  train --run-dir "$row" "${settings[@]}"
  "$PYTHON" 06_export.py --run "$row"
}

# evaluate NAME=CHECKPOINT...: one table, the teacher first.
evaluate() {
  [ -z "${PLAN:-}" ] || return 0
  "$PYTHON" 07_eval.py --run "$RUN" --update "${EVALUATE[@]}" --model teacher="$TEACHER" "$@"
}

# table: the seven ROWS of each number of KV heads on one calibration and one teacher, then one evaluation.
table() {
  local rows checkpoints=() kv row
  read -ra rows <<< "${ROWS:-$TABLE_ROWS}"
  for row in "${rows[@]}"; do
    [[ " $TABLE_ROWS " = *" $row "* ]] ||
      { echo "error: ROWS: expected some of $TABLE_ROWS, found $row" >&2; exit 2; }
  done
  [ -z "${PLAN:-}" ] || rows=("${rows[0]}")  # the others cost the same
  calibrate
  for kv in $KV; do
    for row in "${rows[@]}"; do
      case $row in
        baseline)  convert "gqa$kv-$row" "$kv" none dist none ;;
        default-*) convert "gqa$kv-$row" "$kv" none "${row#*-}" "${row#*-}" ;;
        *)         convert "gqa$kv-$row" "$kv" "${row%-*}" "${row#*-}" "${row#*-}" ;;
      esac
      checkpoints+=("gqa$kv-$row=$RUN/gqa$kv-$row/gqa")
    done
  done
  [ -n "${ROWS:-}" ] || evaluate "${checkpoints[@]}"
}
