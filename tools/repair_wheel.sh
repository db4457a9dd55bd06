#!/usr/bin/env bash
# repair_wheel.sh WHEEL FOLDER: gives the wheel the manylinux tag that its symbols allow, and writes it to FOLDER.
# Nothing is copied in: the libraries of torch and the CUDA runtime are those that torch itself has loaded.
set -euo pipefail
exec auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcudart*' --wheel-dir "$2" "$1"
