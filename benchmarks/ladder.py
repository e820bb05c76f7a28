"""What does each step of mixed precision and compilation gain on one GPU?

The steps are the rungs of a ladder, which four models climb.

Run as: python -m benchmarks.ladder [--works resnet50,bert-large,gpt,cnn] [--rungs
                                    fp32,bf16,...] [--seconds 2] [--minutes 4.75]
                                    [--small] [--keep]

Every rung is a run of Paceline's own loop on an example's train.yaml with a few keys
changed. A rung keeps the changes of the rung that it builds on:

    fp32            no TF32, contiguous tensors, an optimizer that is not fused
    tf32, bf16      set by `precision`; each builds on fp32
    fp16            set by `precision`, too; builds on fp32, and uses a loss scaler with
                    the optimizer that is not fused
    channels_last   builds on bf16; only for models with convolutions
    fused           builds on channels_last, or else on bf16; uses Paceline's own
                    optimizer, which is fused
    compile         builds on fused; torch.compile: how many seconds it adds to the first
                    step, and how many steps win them back
    reduce_overhead, max_autotune    other modes of torch.compile
    cuda_graph      builds on compile; whole steps are captured and replayed
    bf16 again      bf16 a second time, for the A/A floor: a smaller difference between
                    two rungs means nothing

If a rung fails or does not fit, its row says so. The figures are: samples/s after the
warm-up, with the 95 % interval of the step time over n steps; the peak of allocated
memory (including the data, which take at most 0.5 GB); the model's TFLOP/s by torch's own
counter; MFU against the data sheet (peaks.csv); and MFU against a product of two
8192 x 8192 matrices in the same run and in the rung's precision. The most important rungs
run first, and `--minutes` drops the last ones. With `--small` (always without CUDA),
miniatures run: they show that the script works, and nothing about speed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.measure import save
from benchmarks.runs import (
    Budget,
    Measured,
    Runs,
    Work,
    arguments,
    device_and_size,
    example,
    matmul_flops,
    quiet_and_cold,
    release,
)
from trainers.causes import classify

WORKS: dict[str, Work] = {
    "resnet50": example(
        "imagenet", 256, long_steps=True, synthetic=True, samples=256 * 5
    ),
    "bert-large": example(
        "bert",
        128,
        long_steps=True,
        synthetic=True,
        geometry="large",
        samples=128 * 40,
    ),
    "gpt": example(
        "gpt",
        16,
        True,
        context=1024,
        width=1536,
        heads=12,
        layers=12,
        lines=16 * 40 * 18,
        packed=True,
    ),
    "cnn": example("mnist", 128, synthetic=True, samples=128 * 400),
}
_SMALLEST = {"architecture": "shufflenet_v2_x0_5", "stored": 40, "size": 32}
"""A larger ResNet in bf16 would take minutes on a CPU without bf16 instructions."""
# fmt: off
SMALL: dict[str, Work] = {
    "resnet50": example("imagenet", 4, True, synthetic=True, samples=80, **_SMALLEST),
    "bert-large": example("bert", 4, True, synthetic=True, geometry="tiny", length=16, samples=80),
    "gpt": example("gpt", 4, True, context=16, width=32, heads=2, layers=1, lines=200, packed=True),
    "cnn": example("mnist", 4, synthetic=True, samples=80),
}
# fmt: on
CONVOLUTIONS = ("resnet50", "cnn")
_AGAIN = "bf16 again"
_COMPILE_S = 75.0  # assumed until a compiled rung has run
_RUN_S = 12.0
_COMPILED = ("compile", "cuda_graph", "reduce_overhead", "max_autotune")


@dataclass(frozen=True)
class Rung:
    """One run of a workload."""

    name: str
    changes: dict[str, Any]
    fused: bool
    stands_on: str | None
    """The rung that this one builds on: the two differ by one thing."""
    importance: int
    """Rungs with the lowest number run first, and are dropped last."""


@dataclass
class Row:
    """The result of a rung."""

    rung: str
    changes: dict[str, Any]
    status: str
    """done, out_of_memory, failed or dropped"""
    message: str = ""
    cost_s: float = 0.0
    """How long the whole run took, s."""
    figures: dict[str, Any] = field(default_factory=dict)


def rungs(convolutions: bool, host_bound: bool) -> list[Rung]:
    """Return the rungs of the ladder, from the bottom up.

    `host_bound` says that steps are small, so that a CUDA graph should gain most.
    """
    state: dict[str, Any] = {
        "precision": "fp32",
        "channels_last": False,
        "cuda_graphs": False,
    }
    bf16 = state | {"precision": "bf16"}
    last = bf16 | {"channels_last": convolutions}
    compiled = last | {"compile": "default"}
    return [
        Rung("fp32", state, False, None, 0),
        Rung("tf32", state | {"precision": "tf32"}, False, "fp32", 2),
        Rung("bf16", bf16, False, "fp32", 0),
        Rung("fp16", state | {"precision": "fp16"}, False, "fp32", 5),
        *(
            [Rung("channels_last", last, False, "bf16", 1)]
            if convolutions
            else []
        ),
        Rung(
            "fused", last, True, "channels_last" if convolutions else "bf16", 1
        ),
        Rung("compile", compiled, True, "fused", 3),
        Rung(
            "reduce_overhead",
            last | {"compile": "reduce-overhead"},
            True,
            "fused",
            7,
        ),
        Rung(
            "max_autotune",
            last | {"compile": "max-autotune"},
            True,
            "fused",
            8,
        ),
        Rung(
            "cuda_graph",
            compiled | {"cuda_graphs": True},
            True,
            "compile",
            4 if host_bound else 6,
        ),
        Rung(_AGAIN, bf16, False, "bf16", 2),
    ]


def expected_s(rung: Rung, here: list[Row], elsewhere: list[Row]) -> float:
    """Return how long a rung may take, s, judged by the rungs that have run.

    `here` are the rows of this workload, `elsewhere` those of the others. For a
    compiled rung that has not run anywhere, an assumed time to compile is added.
    """
    ran = [row for row in here + elsewhere if row.status != "dropped"]
    own = [
        row.cost_s
        for row in here
        if row.status != "dropped" and row.rung not in _COMPILED
    ]
    plain = max(
        own or [row.cost_s for row in ran if row.rung not in _COMPILED],
        default=_RUN_S,
    )
    if rung.name not in _COMPILED:
        return plain
    same = [row.cost_s for row in ran if row.rung == rung.name]
    return max(
        same,
        default=plain + _COMPILE_S
        if rung.name == "compile"
        else plain + _COMPILE_S / 2,
    )


def figures_of(measured: Measured, matmul: float | None) -> dict[str, Any]:
    """Return the figures of a run.

    `matmul` is the FLOP/s of a matrix product in the same precision, if known.
    """
    result = measured.result
    speed = measured.result.throughput
    assert speed is not None
    flops = (
        None
        if result.flops_per_sample is None
        else result.flops_per_sample * speed.samples_per_s
    )
    return {
        "samples_per_s": speed.samples_per_s,
        "step_time_s": speed.step_time_s,
        "step_time_ci95_s": speed.step_time_ci95_s
        or None,  # no interval from one stretch of steps
        "n": speed.steps,
        "peak_memory_bytes": result.peak_memory_bytes,
        "tflops": None if flops is None else flops / 1e12,
        "mfu_data_sheet": result.mfu,
        "mfu_matmul": None
        if flops is None or matmul is None
        else flops / matmul,
        "first_step_s": result.first_step_s,
    }


def climb(
    runs: Runs, rung: Rung, seconds: float, matmuls: dict[str, float]
) -> Row:
    """Run one rung; if the run fails, the rung's row says how."""
    began = time.monotonic()
    precision = rung.changes["precision"]
    try:
        figures = figures_of(
            runs.run(rung.changes, seconds, rung.fused), matmuls.get(precision)
        )
        row = Row(rung.name, rung.changes, "done", figures=figures)
    except Exception as error:
        status = (
            "out_of_memory"
            if classify(error) in ("out_of_memory", "out_of_host_memory")
            else "failed"
        )
        words = (str(error).splitlines() or [""])[0]
        row = Row(
            rung.name, rung.changes, status, f"{type(error).__name__}: {words}"
        )
    if row.status != "done":
        release()  # here nothing holds the frames of the failed run any more
    row.cost_s = time.monotonic() - began
    return row


def break_even_steps(
    compile_s: float, before_s: float, after_s: float
) -> int | None:
    """Return the number of steps after which compiling has paid for itself.

    None if compiled steps are not faster.
    """
    return (
        None
        if after_s >= before_s
        else math.ceil(compile_s / (before_s - after_s))
    )


def compare(
    ladder: list[Rung], found: dict[str, Row]
) -> tuple[list[Row], float | None]:
    """Return the rows in the ladder's order, and the A/A floor.

    Each row gets its ratios to fp32 and to the rung that it builds on. The floor
    is None if it was not measured.
    """
    rows = [found[rung.name] for rung in ladder if rung.name in found]
    done = {row.rung: row.figures for row in rows if row.status == "done"}
    for rung in ladder:
        mine = done.get(rung.name)
        if mine is None:
            continue
        first = done.get("fp32")
        below = done.get(rung.stands_on or "")
        if first is not None:
            mine["ratio_to_fp32"] = (
                mine["samples_per_s"] / first["samples_per_s"]
            )
            mine["memory_to_fp32"] = (
                mine["peak_memory_bytes"] / first["peak_memory_bytes"]
            )
        if below is not None:
            mine["ratio_to_rung_below"] = (
                mine["samples_per_s"] / below["samples_per_s"]
            )
        if rung.name == "compile" and below is not None:
            mine["compile_s"] = max(
                0.0, mine["first_step_s"] - below["first_step_s"]
            )
            steps = break_even_steps(
                mine["compile_s"], below["step_time_s"], mine["step_time_s"]
            )
            mine["break_even_steps"] = steps
    again = done.get(_AGAIN, {}).get("ratio_to_rung_below")
    return rows, None if again is None else abs(again - 1)


def measure(
    works: dict[str, Work],
    only: list[str] | None,
    device: torch.device,
    seconds: float,
    budget: Budget,
    n: int,
) -> dict[str, Any]:
    """Run the rungs of all workloads, the most important ones first.

    `n` is the number of rows of the two matrices whose product is timed.
    """
    ladders = {
        name: rungs(name in CONVOLUTIONS, name == "cnn") for name in works
    }
    plan = [
        (name, rung)
        for name, ladder in ladders.items()
        for rung in ladder
        if not only or rung.name in only
    ]
    torch.set_num_threads(1)  # as in the runs
    matmuls: dict[str, float] = {}
    for precision in dict.fromkeys(
        rung.changes["precision"] for _, rung in plan
    ):
        if precision != "tf32" or device.type == "cuda":
            matmuls[precision] = matmul_flops(precision, device, n)
    runs = {name: Runs(work, device) for name, work in works.items()}
    found: dict[str, dict[str, Row]] = {name: {} for name in works}
    for name, rung in sorted(plan, key=lambda pair: pair[1].importance):
        rest = [
            row
            for other, rows in found.items()
            if other != name
            for row in rows.values()
        ]
        if budget.affords(
            f"{name} {rung.name}",
            expected_s(rung, list(found[name].values()), rest),
        ):
            row = climb(runs[name], rung, seconds, matmuls)
        else:
            row = Row(
                rung.name,
                rung.changes,
                "dropped",
                f"the budget is {budget.minutes:g} minutes",
            )
        found[name][rung.name] = row
        # A CPU cannot run all rungs; on a GPU, every rung must succeed.
        word = "seen"
        if device.type == "cuda" and row.status != "dropped":
            word = "held" if row.status == "done" else "MISSED"
        spent = f"{budget.spent_s():.0f} s"
        print(
            f"{word}: {name} {rung.name}, at {spent}: {row.status} {row.message}",
            flush=True,
        )
    tflops = {name: rate / 1e12 for name, rate in matmuls.items()}
    result: dict[str, Any] = {"matmul_tflops": tflops, "works": {}}
    for name, ladder in ladders.items():
        rows, floor = compare(ladder, found[name])
        show(name, works[name].batch, rows, floor)
        result["works"][name] = {
            "batch": works[name].batch,
            "floor": floor,
            "rows": [vars(row) for row in rows],
        }
    said = ", ".join(f"{name} {rate:,.1f}" for name, rate in tflops.items())
    print(f"\nmatrix product {n} x {n}, TFLOP/s: {said}")
    return result | {"dropped": budget.dropped}


def show(name: str, batch: int, rows: list[Row], floor: float | None) -> None:
    """Print the table of one workload."""
    said = (
        "not measured"
        if floor is None
        else f"{floor:.1%}: a smaller difference is none"
    )
    print(f"\n{name}   (batch {batch}; A/A floor {said})")
    print(
        f"  {'rung':14} {'samples/s':>10} {'x fp32':>7} {'x below':>8} {'MiB':>8} {'of fp32':>8} {'TFLOP/s':>8} "
        f"{'sheet':>6} {'matmul':>7}  a step, n"
    )
    for row in rows:
        if row.status != "done":
            print(f"  {row.rung:14} {row.status}: {row.message}")
            continue
        it = row.figures
        share = {
            key: _percent(it.get(key))
            for key in ("memory_to_fp32", "mfu_data_sheet", "mfu_matmul")
        }
        line = (
            f"  {row.rung:14} {it['samples_per_s']:10,.0f} {_times(it.get('ratio_to_fp32')):>7} "
            f"{_times(it.get('ratio_to_rung_below')):>8} {it['peak_memory_bytes'] / 2**20:8,.0f} "
            f"{share['memory_to_fp32']:>8} {'-' if it['tflops'] is None else format(it['tflops'], ',.1f'):>8} "
            f"{share['mfu_data_sheet']:>6} {share['mfu_matmul']:>7}  "
            f"{it['step_time_s'] * 1e3:.2f} ms "
            f"+-{'-' if it['step_time_ci95_s'] is None else format(it['step_time_ci95_s'] * 1e3, '.2f')}, n={it['n']}"
        )
        if "compile_s" in it:
            steps = it["break_even_steps"]
            won = (
                "never won back"
                if steps is None
                else f"won back after {steps:,} steps"
            )
            line += f"; compiled in {it['compile_s']:.1f} s, {won}"
        print(line)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--works", type=lambda text: text.split(","), default=list(WORKS)
    )
    parser.add_argument("--rungs", type=lambda text: text.split(","))
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="duration of each rung, after its warm-up",
    )
    given = parser.parse_args()
    device, small = device_and_size(given.small)
    chosen = {name: (SMALL if small else WORKS)[name] for name in given.works}
    budget = Budget(given.minutes)
    with quiet_and_cold():
        results = measure(
            chosen,
            given.rungs,
            device,
            given.seconds,
            budget,
            256 if small else 8192,
        )
    budget.say()
    print(
        f"\nkept in {save('ladder-small' if small else 'ladder', results, given.keep)}"
    )


if __name__ == "__main__":
    main()
