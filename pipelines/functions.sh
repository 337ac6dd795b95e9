# Sourced by the pipelines.

make_once() { [ -e "$1" ] || "${@:2}"; }  # make_once RESULT COMMAND...

# same_settings SETTINGS: refuse others than those that RUN was begun with; keep_settings writes them down
same_settings() {
  [ ! -e "$RUN/settings" ] || [ "$(cat "$RUN/settings")" = "$1" ] || {
    echo "error: $RUN: expected the settings it was begun with ($(cat "$RUN/settings")), found $1;" \
      "pass another RUN" >&2
    exit 2
  }
}
keep_settings() { [ -e "$RUN/settings" ] || { mkdir -p "$RUN" && echo "$1" > "$RUN/settings"; }; }
