# System packages: sourced by examples/quickstart.sh and tests/run.sh.
# shellcheck shell=bash disable=SC2034

build_packages=(g++ cmake ninja-build libcli11-dev libfmt-dev nlohmann-json3-dev libpcre2-dev libtomlplusplus-dev)
text_packages=(bible-kjv bible-kjv-text)
test_packages=(doctest-dev libeigen3-dev)

# Installs those of the named packages that are missing: as root or with sudo; otherwise says what to do and fails.
install_missing() {
  local package missing=() as_root=()
  if ! command -v apt-get dpkg-query >/dev/null; then
    echo "This is neither Debian nor Ubuntu; make sure that the equivalents of these packages are installed: $*"
    return 0
  fi
  for package in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]} > 0)) || return 0

  if ((EUID != 0)); then
    if command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; then
      as_root=(sudo)
    else
      {
        echo "Missing packages: ${missing[*]}"
        echo "Installing them needs root or sudo, and neither is available. Ask an administrator to run"
        echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
        echo "and start this script again."
      } >&2
      return 1
    fi
  fi

  echo "Installing ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300) log
  log=$(mktemp)
  if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    rm -f "$log"
    echo "Could not install ${missing[*]}: see the lines above" >&2
    return 1
  fi
  rm -f "$log"
}
