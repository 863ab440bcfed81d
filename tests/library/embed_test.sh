#!/usr/bin/env bash
# Another project uses strobe: examples/embed built and run against the install tree, by hand, and beside a subfolder.
# Usage: embed_test.sh BUILD. The last line is "N passed, N failed, N skipped".
# shellcheck disable=SC2317  # functions are called through check and refuses
set -uo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/library/checks.sh
source "$here/checks.sh"
CMAKE_GENERATOR=$(cached CMAKE_GENERATOR)
export CC CXX CMAKE_GENERATOR

skipped=0

loss_falls() {
  awk '/loss/ { last = $NF; if (!n++) first = last } END { exit !(n > 5 && last < first / 20) }' "$work/printed"
}

# runs WHERE FOLDER: both programs reach their goals.
runs() {
  check "train_net $1 learns" "$2/train_net"
  mv "$work/log" "$work/printed"
  check "train_net $1 prints a falling loss" loss_falls
  check "attention $1 is right" "$2/attention"
  mv "$work/log" "$work/printed"
  check "attention $1 prints what it checked" grep -E '^dvalue +1\.4762 +0\.9524 +0\.5714 +as expected$' "$work/printed"
  [[ -x $2/attention_cuda ]] || return 0
  check "attention_cuda $1 is right" "$2/attention_cuda"
  mv "$work/log" "$work/printed"
  if [[ $(cat "$work/printed") == "no GPU" ]]; then
    skipped=$((skipped + 1))
    echo "skipped: attention_cuda $1 without a GPU"
  else
    check "attention_cuda $1 prints what it checked" grep -E '^dvalue +differs from the CPU.* by at most' "$work/printed"
  fi
}

# Moved, to a path with a space: the install tree must not remember where it was.
prefix="$work/moved here/strobe"
mkdir "$work/moved here"
mv "$work/prefix" "$prefix"
cp -r "$here/../../examples/embed" "$work/embed"

# Of what the library is built with nothing is in reach: packages are disabled, headers do not compile.
mkdir -p "$work/poison"/{Eigen,nlohmann,CLI,fmt,doctest}
for header in Eigen/{Core,Dense} nlohmann/json.hpp CLI/CLI.hpp fmt/{core,format}.h doctest/doctest.h pcre2.h; do
  echo "#error \"$header must not be needed\"" >"$work/poison/$header"
done
warnings="-Wall -Wextra -Wpedantic -Wconversion -Werror -I$work/poison"
disabled=()
for package in Eigen3 nlohmann_json CLI11 fmt doctest; do disabled+=("-DCMAKE_DISABLE_FIND_PACKAGE_$package=ON"); done

check "configure against the install tree" cmake -S "$work/embed" -B "$work/consumer" "-DCMAKE_PREFIX_PATH=$prefix" \
  "-DCMAKE_CXX_FLAGS=$warnings" "-DCMAKE_C_FLAGS=$warnings" -DBUILD_SHARED_LIBS=ON "${disabled[@]}"
check "build against the install tree" cmake --build "$work/consumer"
runs "from the install tree" "$work/consumer"

# finds LANGUAGES ARGUMENTS: configures a project that asks for the package.
finds() {
  rm -rf "$work/finds" && mkdir "$work/finds"
  cat >"$work/finds/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.16)
project(finds LANGUAGES $1)
find_package(strobe $2 REQUIRED)
END
  cmake -S "$work/finds" -B "$work/finds/build" "-DCMAKE_PREFIX_PATH=$prefix"
}
check "this version and its components" finds CXX "$(cached CMAKE_PROJECT_VERSION) COMPONENTS strobe kernels"
refuses "a later version" "compatible with requested version" finds CXX 99.0
refuses "an unknown component" "strobe_FOUND to FALSE" finds CXX "COMPONENTS nonsense"
refuses "a project without C++" "add CXX to the languages" finds C ""

# The same without CMake, the C program by the C compiler.
mkdir "$work/plain"
include=(-I "$prefix/include" -I "$work/poison")
libraries=(-L "$(dirname -- "$(find "$prefix" -name libstrobe.a)")" -lstrobe -lstrobe_kernels -lpcre2-8 -fopenmp)
grep -q 'built_with_cuda = true' "$prefix/include/strobe/config.h" &&
  libraries+=("$(cached CUDA_cudart_static_LIBRARY)" "$(cached CUDA_cublasLt_LIBRARY)")
[[ $(cached STROBE_SANITIZE) == ON ]] && libraries+=("-fsanitize=address,undefined")
check "train_net by a plain line" "$CXX" -std=c++20 "${include[@]}" "$work/embed/train_net.cpp" "${libraries[@]}" \
  -o "$work/plain/train_net"
check "attention by a plain line" "$CC" -std=c99 "${include[@]}" "$work/embed/attention.c" "${libraries[@]}" \
  -lstdc++ -lm -o "$work/plain/attention"
runs "by a plain line" "$work/plain"

# Beside a subfolder; without optimization, as nearly all of the time goes into compiling the library again.
mkdir "$work/parent"
cat >"$work/parent/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES C CXX)
add_subdirectory("$(cached CMAKE_HOME_DIRECTORY)" strobe)
add_subdirectory("$work/embed" embed)
END
export CCACHE_BASEDIR=$work  # paths below it do not count, as it is another one every time
launcher=$(command -v ccache) || launcher=''
check "configure beside a subfolder" cmake -S "$work/parent" -B "$work/parent/build" -DSTROBE_CUDA=OFF \
  -DCMAKE_CXX_FLAGS=-O0 "-DCMAKE_CXX_COMPILER_LAUNCHER=$launcher"
refuses "a STROBE_CUDA that is none of its values" 'STROBE_CUDA=off given, expected AUTO, ON or OFF' \
  cmake -S "$work/parent" -B "$work/parent/refused" -DSTROBE_CUDA=off
silent "a subfolder brings no tests, no examples and no install rules" find "$work/parent/build/strobe" \
  -name tests -o -name examples -o -name strobeConfig.cmake
check "build beside a subfolder" cmake --build "$work/parent/build" --parallel
runs "beside a subfolder" "$work/parent/build/embed"

finish $skipped
