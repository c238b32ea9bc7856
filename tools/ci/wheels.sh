#!/usr/bin/env bash
# Build every member's wheel, and use the wheels in clean environments outside the workspace.
set -euo pipefail
cd "$(dirname "$0")/../.."

cpu=""
[ "$(uname)" = Linux ] && cpu="[cpu]"
names=$(uv run --quiet --no-project --python '>=3.11' tools/ci/members.py | tr -d '[],"')
root=$PWD
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

uv build --quiet --all-packages --out-dir "$tmp/dist"

wheel_of() { # NAME: the requirement that installs the wheel itself, and no namesake from an index
    echo "$1$cpu @ file://$(ls "$tmp/dist/${1//-/_}"-*.whl)"
}

requirements=()
for name in $names; do
    requirements+=("$(wheel_of "$name")")
    files=$(python3 -m zipfile -l "$tmp/dist/${name//-/_}"-*.whl)
    for file in "${name//-/_}/py.typed" "dist-info/licenses/LICENSE"; do
        grep -q "$file" <<<"$files" || { echo "the wheel of $name lacks $file"; exit 1; }
    done
done

cd "$tmp"
uv venv --quiet core
uv pip install --quiet --python core "$(wheel_of h2o-core)"
uv pip check --python core
core/bin/python -I - <<'PY'
from importlib.util import find_spec

import mlx.core as mx

from h2o_core import H2OConfig, simulate

trace = simulate(mx.tri(8)[None] / mx.arange(1, 9)[:, None], H2OConfig(budget=4, n_sink=1, grace=1))
assert trace.kept[-1, 0].tolist() == [0, 1, 2, 7], trace.kept
extra = [name for name in ("h2o_rope", "h2o_metal", "h2o_mlxlm", "mlx_lm", "jaxtyping") if find_spec(name)]
assert not extra, extra
print("h2o-core alone: simulated")
PY
core/bin/h2o-sim generate needles --steps 128 --heads 2 --out needles.safetensors >/dev/null
core/bin/h2o-sim compare needles.safetensors --prompt-len 32 --budget 24 --scorers
core/bin/h2o-sim compare "$root/packages/h2o-core/tests/data/smollm2.safetensors" --prompt-len 64 --budget 64 --scorers

uv venv --quiet rope
uv pip install --quiet --python rope "$(wheel_of h2o-rope)"
uv pip check --python rope
rope/bin/python -I - <<'PY'
from importlib.util import find_spec

import mlx.core as mx
import mlx.nn as nn

from h2o_rope import derotate

rope, x = nn.RoPE(8), mx.random.normal((1, 2, 3, 8))
assert mx.allclose(derotate(rope(x, offset=5), mx.array([[[5, 6, 7]]]), rope), x, atol=1e-4)
extra = [name for name in ("h2o_core", "h2o_metal", "h2o_mlxlm", "mlx_lm", "jaxtyping") if find_spec(name)]
assert not extra, extra
print("h2o-rope alone: derotated")
PY

uv venv --quiet all
uv pip install --quiet --python all "${requirements[@]}"
uv pip check --python all
all/bin/python -I - $names <<'PY'
import sys
from importlib import import_module
from pathlib import Path

for name in sys.argv[1:]:
    module = import_module(name.replace("-", "_"))
    assert Path(module.__file__).is_relative_to(Path(sys.prefix)), module.__file__
    for public in module.__all__:
        getattr(module, public)
print("all of them: imported")
PY
all/bin/h2o-mlxlm --help >/dev/null
all/bin/python -I -m h2o_mlxlm generate --help >/dev/null
echo "h2o-mlxlm: --help answers"
