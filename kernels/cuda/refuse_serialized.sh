#!/bin/sh
# Runs a compiler and fails where ptxas had to wait between products of wgmma that should overlap: it only informs of
# it (C7510 and its neighbours), and the kernel would be slow without a sign.
# Usage: refuse_serialized.sh COMPILER ARGUMENT...
said=$("$@" 2>&1)
status=$?
[ -z "$said" ] || printf '%s\n' "$said" >&2
case $said in
  *"wgmma.mma_async instructions are serialized"*)
    echo "refuse_serialized.sh: products of wgmma are serialized, expected none" >&2
    exit 1
    ;;
esac
exit "$status"
