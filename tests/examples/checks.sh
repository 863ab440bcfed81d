# Sourced by the tests here: counts checks, and enters a temporary folder $work that is removed in the end.
# shellcheck shell=bash

passed=0 failed=0 skipped=0
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work" || exit 1

pass() { passed=$((passed + 1)); }
fail() {
  failed=$((failed + 1))
  echo "FAILED: $1"
}
skip() {
  skipped=$((skipped + 1))
  echo "skipped: $1"
}

# check NAME COMMAND...: the command must succeed.
check() {
  local name=$1
  shift
  if "$@" >"$work/log" 2>&1; then pass; else
    fail "$name"
    tail -n 5 "$work/log"
  fi
}

finish() {
  echo "$passed passed, $failed failed, $skipped skipped"
  exit $((failed > 0))
}
