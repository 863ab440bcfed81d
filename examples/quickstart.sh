#!/usr/bin/env bash
# From a fresh Debian 12 or Ubuntu 24.04 to a trained GPT: packages, build, text, two minutes of training, a sample.
set -euo pipefail

usage() {
  cat <<'END'
Usage: examples/quickstart.sh [--data FILE] [OPTIONS OF train_gpt]

Installs what is missing, builds strobe for this processor and trains a small character-level GPT: by default on the
King James Bible for about two minutes on two cores. Results go to runs/quickstart, the next time to runs/quickstart-2,
and so on; --resume goes on with the last of them, --overwrite replaces it. Everything after the script's name goes to
the trainer: examples/quickstart.sh --steps 500 --layers 6. Its options: build/cpu/examples/train_gpt --help
END
}

has_argument() {  # has_argument NAME ARGUMENTS...: whether NAME or NAME=VALUE is among the arguments
  local name=$1 argument
  shift
  for argument in "$@"; do
    [[ $argument == "$name" || $argument == "$name="* ]] && return 0
  done
  return 1
}

if has_argument --help "$@" || has_argument -h "$@"; then
  usage
  exit 0
fi

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=.ci/packages.sh
source "$root/.ci/packages.sh"

packages=("${build_packages[@]}")
own_text=no
if has_argument --data "$@" || has_argument --tokens "$@" || has_argument --config "$@" ||
  has_argument --resume "$@"; then
  own_text=yes
else
  packages+=("${text_packages[@]}")
fi
install_missing "${packages[@]}"

cuda=(-DSTROBE_CUDA=OFF)  # nvcc takes minutes, and without a GPU nothing would come of it
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  if PATH="$PATH:/usr/local/cuda/bin" nvcc --version 2>/dev/null |
    grep -qE 'release (12\.([4-9]|[1-9][0-9])|1[3-9]\.)'; then
    cuda=(-DSTROBE_CUDA=AUTO -DCMAKE_CUDA_ARCHITECTURES=native)
  else
    echo "There is an NVIDIA GPU here, but no nvcc that strobe can use: this run uses the processor. To train on the GPU"
    echo "install the CUDA Toolkit, 12.4 or newer, delete build/cpu and start again."
  fi
fi

build="$root/build/cpu"
if [[ ! -f "$build/build.ninja" ]]; then
  (cd "$root" && cmake --preset cpu -DSTROBE_BUILD_TESTS=OFF "${cuda[@]}")  # tests/run.sh builds all
fi
cmake --build "$build" --target train_gpt generate

out="$root/runs/quickstart" last='' number=1
while [[ -e $out ]]; do
  last=$out number=$((number + 1)) out="$root/runs/quickstart-$number"
done
if [[ -n $last ]] && { has_argument --resume "$@" || has_argument --overwrite "$@"; }; then out=$last; fi
arguments=()
has_argument --out "$@" || arguments+=(--out "$out")
if [[ $own_text == no ]]; then
  text="$root/build/king_james_bible.txt"
  if [[ ! -s $text ]]; then
    bible -f Gen1:1-Rev22:21 | sed 's/^[^ ]* //' >"$text.partial"  # without "Gen1:1 " before each verse
    mv "$text.partial" "$text"
  fi
  arguments+=(--data "$text")
fi
# Threads that wait for each other sleep: spinning costs most of the speed as soon as another program uses a core.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY-passive}"
"$build/examples/train_gpt" "${arguments[@]}" "$@"
