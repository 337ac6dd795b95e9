# Sourced by the pipelines.

# make_once RESULT COMMAND...: run COMMAND, unless it has made RESULT. A RESULT made with other arguments, which
# .RESULT.command beside it has, is refused; one without that file was made by hand, and is taken as it is.
make_once() {
  local result=${1%/stage.json} arguments=${*:3}  # whatever the interpreter
  local directory=${result%/*} record=${result%/*}/.${result##*/}.command
  if [ ! -e "$1" ]; then
    mkdir -p "$directory"
    echo "$arguments" > "$record"
    "${@:2}"
  elif [ -e "$record" ] && [ "$(cat "$record")" != "$arguments" ]; then
    echo "error: $1: expected it made by $arguments, found $(cat "$record"); pass another RUN" >&2
    exit 2
  fi
}
