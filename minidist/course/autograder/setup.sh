#!/usr/bin/env bash
# Run once, as root, when the image is built.
set -euo pipefail
cd "$(dirname "$0")"
apt-get update && apt-get install -y python3 python3-venv
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python $(python3 --version) is too old for minidist: choose an image with 3.11 or later" >&2; exit 1; }
python3 -m venv .venv
# EDIT: if torch is to come from elsewhere. From this index of its own it comes for the CPU alone, without 5 GB of CUDA.
.venv/bin/pip install --index-url https://download.pytorch.org/whl/cpu {{torch}}
.venv/bin/pip install {{requirements}}
id student 2>/dev/null || useradd --create-home student
