#!/usr/bin/env bash
# A checkpoint in llama.cpp: converted to GGUF, run there, and compared with transformers token by token.
#
#   bash pipelines/gguf.sh RUN/gqa                              # -> RUN/gqa.f32.gguf
#   OUTTYPE=q4_0 bash pipelines/gguf.sh RUN/gqa out.gguf        # quantized by llama.cpp
#   PRE=superbpe bash pipelines/gguf.sh runs/demo/gqa           # the demo model
#
#   OUTTYPE  f32 (default), f16, bf16, q8_0, q4_0 or q4_k_m; the last two by way of f32
#   TEXT     text file: the perplexity of its first SEQUENCES (16) x 512 tokens, in llama.cpp and transformers,
#            with quantized caches, too
#   PYTHON   interpreter (python), with requirements.txt
#   PRE      llama.cpp's name of the pre-tokenizer to assume when its converter does not know the tokenizer.
#            For the demo model superbpe: it splits at digits only, and the model's merges never mix letters
#            and punctuation anyway
#   TOKENS   tokens generated per prompt (32)      PROMPTS  text file, a prompt per line (six built in)
#
# A GGUF file that already exists is compared, not made again; it may come from another tool. The first call
# downloads llama.cpp (77 MB) and builds it in .gguf/ for the CPU: this needs a C++ compiler and some minutes.
set -euo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python}
OUTTYPE=${OUTTYPE:-f32}
VERSION=0.3.36  # of llama-cpp-python; its source carries llama.cpp and the converter
engine=$home/.gguf/llama_cpp_python-$VERSION

[ $# = 1 ] || [ $# = 2 ] || { echo "error: expected CHECKPOINT [OUT.gguf], found $# arguments" >&2; exit 2; }
[ -f "$1/config.json" ] ||
  { echo "error: $1: expected a checkpoint directory, found no config.json in it" >&2; exit 2; }

out=${2:-${1%/}.$OUTTYPE.gguf}
# packages are installed next to the interpreter's; the dependencies that those lack are named, for --no-deps
if [ ! -d "$engine/packages" ]; then
  echo "downloading llama.cpp to $engine, and building it there"
  rm -rf "$engine"  # left by an interruption
  "$PYTHON" -m pip download -q --no-deps --no-binary llama-cpp-python -d "$home/.gguf" \
    "llama-cpp-python==$VERSION"
  tar -xzf "$engine.tar.gz" -C "$home/.gguf"
  # skip the helpers of llama.cpp's command-line programs, which nothing here calls
  sed -i.orig 's/LLAMA_BUILD_COMMON ON/LLAMA_BUILD_COMMON OFF/' "$engine/CMakeLists.txt"
  CMAKE_ARGS="-DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}" "$PYTHON" -m pip install -q --no-deps \
    --target "$engine/unfinished" "$engine" diskcache==5.6.3 sentencepiece==0.2.1
  mv "$engine/unfinished" "$engine/packages"
fi

PYTHONPATH=$home:$engine/packages:$engine/vendor/llama.cpp \
"$PYTHON" -m pipelines.gguf_check "$1" "$out" \
  --outtype "$OUTTYPE" ${PRE:+--pre "$PRE"} ${TOKENS:+--tokens "$TOKENS"} ${PROMPTS:+--prompts "$PROMPTS"} \
  ${TEXT:+--text "$TEXT"} ${SEQUENCES:+--sequences "$SEQUENCES"}
