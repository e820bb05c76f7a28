"""Write docs/config.md from the configuration models; a test checks that the page is current.

Run as: python docs/make.py > docs/config.md
"""

from __future__ import annotations

from trainers.config import TrainConfig
from trainers.config.function import FunctionConfig
from trainers.config.reference import markdown
from tune.config import SweepConfig

HEAD = """# Configuration

Every key of `train.yaml` and `sweep.yaml`, from the models themselves (`make docs` writes this page). Each is
overridable as `--dotted.key value`; the keys of a sweep's run as `--train.dotted.key value`. Files are YAML 1.2: `1e-3`
is a number and `off` is a word. An unknown key is an error that names the near miss, or what it is called here
(`accumulate_grad_batches`). Of a task's run exactly one of `global_batch_size` and `batch_size_per_worker`, and exactly
one of `epochs` and `max_steps`, is required.
"""


def page() -> str:
    """The whole page."""
    of_function = markdown("train.yaml with train_func", FunctionConfig)
    return "\n".join([HEAD, markdown("train.yaml", TrainConfig), of_function, markdown("sweep.yaml", SweepConfig)])


if __name__ == "__main__":
    print(page(), end="")
