"""How an attempt ended, with the figures of all ranks."""

import math
import time

from trainers.errors import Status
from trainers.loop.attempt import Attempt
from trainers.loop.monitor import Monitor
from trainers.measure.profiler import Inspection
from trainers.measure.ranks import total_energy_j
from trainers.measure.result import RunResult


def finish(status: Status, attempt: Attempt, monitor: Monitor, inspection: Inspection | None) -> RunResult:
    """Return the result, the same on every rank; rank 0 writes it. Every rank must call it."""
    config, context, parts, clock = attempt.config, attempt.context, attempt.parts, attempt.clock
    group, noise, speed = parts.group, parts.step.noise, clock.throughput()
    ranks = monitor.finish()
    compiled = inspection.compiled() if inspection is not None else None
    mfu = monitor.mfu(speed.samples_per_s) if speed is not None else None
    of_rank_0 = group.first((speed, clock.first_step_s, parts.flops_per_sample, mfu, compiled))
    throughput, first_step_s, flops_per_sample, mfu, compiled = of_rank_0
    result = RunResult(
        status=status,
        steps=attempt.step,
        epochs=attempt.epochs,
        world_size=context.world_size,
        global_batch_size=config.batch_size,
        microbatch_size=parts.microbatch_size,
        accumulation=parts.accumulation,
        train_time_s=clock.train_time_s,
        wall_time_s=time.monotonic() - attempt.began,
        peak_memory_bytes=max(row["peak_bytes"] for row in ranks),
        throughput=throughput,
        metrics={name: value for name, value in attempt.metrics.items() if not math.isnan(value)},
        checkpoint=attempt.checkpoint,
        message=attempt.stopping.words or "",
        first_step_s=first_step_s,
        compile=compiled,
        flops_per_sample=flops_per_sample,
        mfu=mfu,
        ranks=ranks,
        noise_scale=noise.figures() if noise is not None else None,
        samples=attempt.samples,
        batch_schedule=parts.sampler.batches.tree() if config.changes_batch else None,
        earlier_time_s=attempt.earlier_time_s,
        energy_j=total_energy_j(ranks),
        pauses=attempt.pauses,
    )
    if attempt.log is not None and context.storage is not None:
        attempt.log.flush(attempt.step)
        context.storage.write("result.json", result.to_json().encode())
    group.barrier()
    return result
