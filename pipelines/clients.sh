#!/usr/bin/env bash
# Do the programs that people run a model with work on an export as they do on its source? See clients.py.
#
#   bash pipelines/clients.sh                               # small random models of eight kinds, every client
#   bash pipelines/clients.sh --clients mlx-lm --kinds qwen2
#   bash pipelines/clients.sh --source DIR --kv-heads 4     # a checkpoint of yours
#
# The table goes to RUN/clients.md, too; that of docs/CLIENTS.md has the rows of several such runs.
#
#   PYTHON   interpreter (python), with requirements-dev.txt      PRE   see gguf.sh, with --source
#
# The first call installs each client in .clients/ (1.5 GB, vLLM 4 GB more) and builds llama.cpp (gguf.sh).
set -euo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH=$home exec "${PYTHON:-python}" -m pipelines.clients "$@"
