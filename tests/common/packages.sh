#!/usr/bin/env bash
# Python packages that only tests use: each set in a directory of its own beside vLLM's venv, never in it.
#   packages.sh ENVIRONMENT readers|speculators|object-stores     makes ENVIRONMENT/test-packages/NAME, and prints it for PYTHONPATH
# ENVIRONMENT is made by src/demo_env/setup.sh. Safe to run again after a failure, and twice at once.
set -euo pipefail
environment=${1:?usage: packages.sh ENVIRONMENT NAME} name=${2:?usage: packages.sh ENVIRONMENT NAME}
case $name in
  readers) packages=(pyarrow==26.0.1 duckdb==2.0.1 tzdata==2026.6) ;;
  # its model code alone: torch, transformers and pydantic are vLLM's
  speculators) packages=(--no-deps speculators==0.9.0) ;;
  # a server that speaks S3
  object-stores) packages=("moto[s3,server]==5.2.5") ;;
  *) echo "no set of packages is named \`$name\`: readers, speculators, object-stores" >&2; exit 2 ;;
esac
target=$environment/test-packages/$name
mkdir -p "${target%/*}"
exec 9>"$target.lock"; flock 9
if [ "$(cat "$target/installed" 2>/dev/null)" != "${packages[*]}" ]; then
  rm -rf "$target"
  "$environment/venv/bin/uv" pip install -q --python "$environment/venv/bin/python" --target "$target" "${packages[@]}" >&2
  echo "${packages[*]}" >"$target/installed"  # last: half an installation is not taken for a whole one
fi
echo "$target"
