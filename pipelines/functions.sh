# Sourced by the pipelines.

# make_once RESULT COMMAND...: run COMMAND, unless it has made RESULT. A RESULT made with other arguments, which
# RESULT.command has, is refused; one without that file was made by hand, and is taken as it is.
make_once() {
  local record=${1%/stage.json}.command arguments=${*:3}  # whatever the interpreter
  if [ ! -e "$1" ]; then
    mkdir -p "$(dirname "$record")"
    echo "$arguments" > "$record"
    "${@:2}"
  elif [ -e "$record" ] && [ "$(cat "$record")" != "$arguments" ]; then
    echo "error: $1: expected it made by $arguments, found $(cat "$record"); pass another RUN" >&2
    exit 2
  fi
}
