#!/usr/bin/env bash
# The tests of Hopper attention once more, with the path of its softmax that few inputs reach taken by every input.
# Usage: slow_softmax_test.sh BUILD. The last line is "N passed, N failed, N skipped".
set -uo pipefail

pattern='^\[doctest\] test cases: .*\| +([0-9]+) passed +\| +([0-9]+) failed'
output=$(STROBE_FORCE_SLOW_SOFTMAX=1 "$1/tests/strobe_tests" --no-colors --test-case='cuda attention hopper*' 2>&1)
echo "$output"
passed=0 failed=1 skipped=0
while IFS= read -r line; do
  [[ $line =~ $pattern ]] && passed=${BASH_REMATCH[1]} failed=${BASH_REMATCH[2]}
done <<<"$output"
((passed + failed > 0)) || skipped=1
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
