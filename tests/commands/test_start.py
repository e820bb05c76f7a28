"""What a start may not import."""

import json

# What takes long to import and no small run needs: 1 to 8 s each.
# fmt: off
HEAVY = {
    "ray", "torchvision", "sklearn", "scipy", "pandas", "matplotlib", "transformers", "torchmetrics", "tensorboardX",
}
# fmt: on
SAY = """
import json, sys
from trainers.__main__ import main
code = main(sys.argv[2:])
open(sys.argv[1], "w").write(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
raise SystemExit(code)
"""


def test_a_local_run_imports_nothing_heavy_but_torch(tmp_path, command):
    # fmt: off
    done = command(
        "-c", SAY, str(tmp_path / "modules"), "examples/your_model/train.yaml", "--max_steps 1 --device cpu --storage_path", str(tmp_path / "runs"), "--launcher local",
    )
    # fmt: on
    assert done.code == 0, done.err
    imported = set(json.loads((tmp_path / "modules").read_text()))
    assert "torch" in imported
    assert not imported & HEAVY
    assert not imported & {"tune", "cluster"}
