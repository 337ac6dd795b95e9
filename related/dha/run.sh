#!/usr/bin/env bash
# DHA from search to comparison, with GQA baselines of the same cache and the same training tokens. A quarter of an hour on two cores.
#
#   bash related/dha/run.sh                                                              # the embedded model
#   RUN=runs/dha-my bash related/dha/run.sh --model DIR --text train.txt --heldout heldout.txt     # an MHA Llama; flags go to search.py
#
# STEPS   training steps of every row, search and fusion included (400)     FUSE   further flags of fuse.py
# PYTHON  interpreter (python)                                             RUN    where everything goes (runs/dha)
# What stands already is not made again: after an interruption, run the same command.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
RUN=${RUN:-runs/dha}
STEPS=${STEPS:-400}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
make_once() { [ -e "$1" ] || "${@:2}"; }  # make_once RESULT COMMAND...
of_search() { "$PYTHON" -c "import json; found = json.load(open('$RUN/search.json')); print(found$1)"; }

make_once "$RUN/search.json" "$PYTHON" -m related.dha.search --run "$RUN" "$@"
make_once "$RUN/fused"       "$PYTHON" -m related.dha.fuse --run "$RUN" ${FUSE:-}
make_once "$RUN/dha"         "$PYTHON" -m related.dha.pretrain --run "$RUN" --steps "$STEPS"

# the baselines: stages 1 to 4 on the same text, then the same training
LENGTH=$(of_search "['summary']['data']['length']")
KV=$(of_search "['summary']['kv_heads']")
make_once "$RUN/calibration" "$PYTHON" 01_calibrate.py --run "$RUN" --model "$(of_search "['model']['name']")" --text "$(of_search "['summary']['data']['text']")" --length "$LENGTH"
make_once "$RUN/similarity.safetensors"  "$PYTHON" 02_similarity.py --run "$RUN"
baseline() {  # baseline NAME BY FLAGS-OF-STAGE-4...
  local start=$RUN/start-$1
  make_once "$start/groups.json" "$PYTHON" 03_group.py --run "$start" --similarity "$RUN/similarity.safetensors" --kv-heads "$KV" --by "$2"
  make_once "$start/merged"      "$PYTHON" 04_align.py --run "$start" --calibration "$RUN/calibration" "${@:3}"
  make_once "$RUN/$1"            "$PYTHON" -m related.dha.pretrain --run "$RUN" --steps "$STEPS" --name "$1" --start "$start/merged"
}
baseline mean-pool   none   --rotate none
baseline aligned     value
baseline closed-form energy --merge closed-form --refit
make_once "$RUN/source"       "$PYTHON" -m related.dha.pretrain --run "$RUN" --steps "$STEPS" --name source --start "$(of_search "['model']['path']")"
make_once "$RUN/compare.json" "$PYTHON" -m related.dha.compare --run "$RUN"
