# Sourced by the tests here: counts checks and installs BUILD, the script's argument, under the temporary folder $work.
# Where that cannot be, the script ends with one check skipped.
# shellcheck shell=bash disable=SC2034

build=$(cd -- "$1" && pwd)
passed=0 failed=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pass() { passed=$((passed + 1)); }
fail() {
  failed=$((failed + 1))
  echo "FAILED: $1"
  tail -n 20 "$work/log"
}
finish() {
  echo "$passed passed, $failed failed, ${1-0} skipped"
  exit $((failed > 0))
}
skip_all() {
  echo "skipped: $1"
  finish 1
}

# check NAME COMMAND...: the command must succeed.
check() {
  local name=$1
  shift
  if "$@" >"$work/log" 2>&1; then pass; else fail "$name"; fi
}

# silent NAME COMMAND...: the command must print nothing.
silent() {
  local name=$1
  shift
  "$@" >"$work/log" 2>&1
  if [[ ! -s $work/log ]]; then pass; else fail "$name"; fi
}

# refuses NAME PATTERN COMMAND...: the command must fail and say what matches, in whatever lines.
refuses() {
  local name=$1 pattern=$2
  shift 2
  if "$@" >"$work/log" 2>&1; then
    fail "$name: was accepted"
  elif tr -s ' \n' ' ' <"$work/log" | grep -qE -- "$pattern"; then
    pass
  else
    fail "$name: expected a message that matches '$pattern'"
  fi
}

# cached NAME: what the build was configured with.
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }

command -v cmake >/dev/null || skip_all "no cmake here"
[[ -f $build/cmake_install.cmake ]] || skip_all "'$build' holds only programs"
CXX=$(cached CMAKE_CXX_COMPILER)
CC=gcc
for tool in "$CXX" "$CC" nm; do command -v "$tool" >/dev/null || skip_all "no $tool here"; done
check "cmake --install" cmake --install "$build" --prefix "$work/prefix"
((failed == 0)) || finish
