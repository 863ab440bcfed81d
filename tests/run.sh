#!/usr/bin/env bash
# Builds and runs all tests. The last line is "N passed, N failed, N skipped"; any failure gives a non-zero exit.
set -euo pipefail

usage() {
  cat <<'END'
Usage: tests/run.sh [--preset cpu|asan|cuda] [--no-build DIR]

Installs what is missing, builds and runs all tests: by default with the preset cpu. --preset asan does the same under
the address and undefined-behaviour sanitizers. --no-build DIR runs what was built in DIR before and installs nothing.
END
}

fail_usage() {
  echo "tests/run.sh: $1" >&2
  usage >&2
  exit 2
}

preset='' build=''
while (($# > 0)); do
  case $1 in
    --preset)
      [[ ${2-} == cpu || ${2-} == asan || ${2-} == cuda ]] || fail_usage "--preset: '${2-}' given, expected cpu, asan or cuda"
      preset=$2
      shift 2
      ;;
    --no-build)
      [[ -n ${2-} ]] || fail_usage "--no-build: expected the folder of a build"
      [[ -x $2/tests/strobe_tests ]] || fail_usage "--no-build: no tests/strobe_tests in '$2', expected the folder of a build"
      build=$(cd -- "$2" && pwd)
      shift 2
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail_usage "'$1' was not expected" ;;
  esac
done
[[ -z $preset || -z $build ]] || fail_usage "--preset and --no-build: expected one of them"

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z $build ]]; then
  # shellcheck source=.ci/packages.sh
  source "$root/.ci/packages.sh"
  install_missing "${build_packages[@]}" "${test_packages[@]}"
  build="$root/build/${preset:=cpu}"
  (cd "$root" && cmake --preset "$preset" -DSTROBE_BUILD_TESTS=ON -DSTROBE_BUILD_EXAMPLES=ON && cmake --build --preset "$preset")
fi
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY-passive}"  # threads that spin are slow beside other programs
export STROBE_TEST_DATA="$root/tests/data"
export UBSAN_OPTIONS=${UBSAN_OPTIONS-print_stacktrace=1}

passed=0 failed=0 skipped=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# run NAME PATTERN COMMAND...: shows what the command prints and adds the three counts that PATTERN finds there last. A
# command that fails without having counted a failure, or counts nothing, is one failure itself.
run() {
  local name=$1 pattern=$2 status=0 line='' counted=0
  shift 2
  echo "== $name"
  "$@" </dev/null 2>&1 | tee "$output" || status=$?
  while IFS= read -r line; do
    [[ $line =~ $pattern ]] && counts=("${BASH_REMATCH[@]:1}") && counted=1
  done <"$output"
  if ((counted == 1)); then
    ((passed += counts[0], failed += counts[1], skipped += counts[2])) || true
  fi
  if ((status != 0 && (counted == 0 || counts[1] == 0))) || ((counted == 0)); then
    echo "$name: ended with status $status" >&2
    failed=$((failed + 1))
  fi
}

for program in strobe_tests train_tests; do
  run "$program" '^\[doctest\] test cases: .*\| +([0-9]+) passed +\| +([0-9]+) failed +\| +([0-9]+) skipped' \
    "$build/tests/$program" --no-colors
done
for script in "$root"/tests/*/*_test.sh; do
  run "${script#"$root"/}" '^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$' bash "$script" "$build"
done
if command -v python3 >/dev/null; then
  run tests/torch_parity.py '^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$' \
    python3 "$root/tests/torch_parity.py" "$build"
else
  echo "skipped: tests/torch_parity.py: no python3"
  skipped=$((skipped + 1))
fi
if command -v cmake >/dev/null; then
  # shellcheck disable=SC2016  # the inner bash expands
  run include_order '^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$' bash -c \
    'cmake -DROOT="$1" -P "$1/tests/include_dag.cmake" && echo "1 passed, 0 failed, 0 skipped"' bash "$root"
else
  skipped=$((skipped + 1))
fi

echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
