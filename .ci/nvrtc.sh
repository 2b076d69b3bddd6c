#!/usr/bin/env bash
# NVRTC without CUDA or a GPU, for tests/cuda_kernels.rs (150 MB).
set -euo pipefail
target="$HOME/.cache/draftsmith/nvrtc"
python3 -m pip install --quiet --no-deps --upgrade --target "$target" nvidia-cuda-nvrtc==13.0.88
