#!/usr/bin/env bash
# What this project needs on a GPU host that has vLLM 0.33 for Python 3.12 on its path, and no network: its wheel and the
# wheels it depends on, and these scripts, in one directory.
#
#   usage: pack.sh [DIR]       (default: build/gpu)
#   then, on that host:        bash DIR/unpack.sh /tmp/site; PYTHONPATH=/tmp/site bash DIR/benchmarks/gpu/run.sh OUT
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
dir=$(realpath -m "${1:-$root/build/gpu}")
python=${PYTHON:-$root/.venv/bin/python}
rm -rf "$dir" && mkdir -p "$dir"
rm -rf "$root"/build/lib "$root"/build/bdist.*
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$dir" "$root"
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest "$dir" \
    blake3 cbor2 click deepseek-recipe httptools "llguidance<1.8.0" lmdb msgpack orjson prometheus-client pydantic \
    pydantic-core annotated-types typing-inspection pyyaml shellingham typer uvloop xxhash zfec
mkdir -p "$dir/benchmarks" "$dir/tests"
cp -r "$root/benchmarks/gpu" "$root/benchmarks/chunks" "$dir/benchmarks/"
cp -r "$root/tests/reference" "$dir/tests/"
find "$dir" -name __pycache__ -prune -exec rm -rf {} +
cat > "$dir/unpack.sh" <<'UNPACK'
#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p "${1:-/tmp/site}"
for wheel in *.whl; do python3 -m zipfile -e "$wheel" "${1:-/tmp/site}"; done
UNPACK
du -sh "$dir"
