#!/usr/bin/env bash
# DHA from search to report, with GQA baselines of the same cache size and the same training tokens: a quarter
# of an hour on two cores.
#
#   bash related/dha/run.sh                                  # the demo model
#   RUN=runs/dha-my bash related/dha/run.sh --model DIR --text train.txt --heldout heldout.txt
#
# The source is an MHA Llama; flags go to search.py. Environment:
#   STEPS   training steps of every row, search and fusion included (400)
#   FUSE    flags of fuse.py, separated by blanks
#   STAGED  if set, a row "staged" that halves the cache twice (Appendix B.2); it takes more STEPS
#   RUN     directory of all results (runs/dha)
#   PYTHON  interpreter (python)
# A step that is complete is not run again: after an interruption, run the same command again.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
RUN=${RUN:-runs/dha}
STEPS=${STEPS:-400}
read -ra FUSE_FLAGS <<< "${FUSE:-}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
dha() { "$PYTHON" -m "related.dha.$1" --run="$RUN" "${@:2}"; }  # dha SCRIPT FLAGS...

dha search "$@"
dha fuse "${FUSE_FLAGS[@]}"
dha pretrain --steps "$STEPS"

pooled() {  # pooled NAME WEIGHTS: DHA's groups without fusion
  dha start --weights "$2"
  dha pretrain --steps "$STEPS" --name "$1" --checkpoint="$RUN/start-$1"
}
pooled cold    source
pooled unfused searched

field() {  # field NAME...: of the record of search
  "$PYTHON" -c 'import functools, json, sys
print(functools.reduce(dict.get, sys.argv[2:], json.load(open(sys.argv[1]))))' "$RUN/searched/stage.json" "$@"
}
MODEL=$(field model name)
SOURCE=$(field model path)
TEXT=$(field summary data text)
LENGTH=$(field summary data length)
KV_HEADS=$(field summary kv_heads)

ROWS=()
halve() {  # halve DIRECTORY FLAGS...: search and fusion in a directory of their own
  dha search "${@:2}" --run="$1"
  dha fuse "${FUSE_FLAGS[@]}" --run="$1"
}
if [ -n "${STAGED:-}" ]; then
  halve "$RUN/half"    "$@" --kv-heads $((2 * KV_HEADS))
  halve "$RUN/quarter" "$@" --model "$RUN/half/fused" --kv-heads "$KV_HEADS"
  dha pretrain --steps "$STEPS" --name staged --checkpoint="$RUN/quarter/fused"
  ROWS=(--names source mean-pool aligned closed-form cold unfused staged dha)
fi

# the baselines: stages 1 to 4 on the same text, then the same training
"$PYTHON" 01_calibrate.py --run="$RUN" --model="$MODEL" --text="$TEXT" --length "$LENGTH"
"$PYTHON" 02_similarity.py --run="$RUN" --energy
baseline() {  # baseline NAME BY FLAGS-OF-STAGE-4...
  local start=$RUN/start-$1
  "$PYTHON" 03_group.py --run="$start" --similarity="$RUN/similarity" \
    --kv-heads "$KV_HEADS" --by "$2"
  "$PYTHON" 04_align.py --run="$start" --calibration="$RUN/calibration" "${@:3}"
  dha pretrain --steps "$STEPS" --name "$1" --checkpoint="$start/merged"
}
baseline mean-pool   none   --rotate none
baseline aligned     value
baseline closed-form energy --merge closed-form --refit
dha pretrain --steps "$STEPS" --name source --checkpoint="$SOURCE"
dha report "${ROWS[@]}"
