"""The job that trains."""

from trainers.context import RunContext
from trainers.launch.process import without_collection
from trainers.launch.spec import Job
from trainers.loop.watchdog import watched
from trainers.measure.result import RunResult


class TrainJob(Job[RunResult]):
    """Trains a run with our loop."""

    answer = RunResult

    def execute(self, context: RunContext) -> RunResult:
        """Train as one worker."""
        with watched(self.config.failure, context):
            with without_collection():
                import torch._dynamo  # noqa: F401 (every optimizer imports it)

                from trainers.loop.fit import fit
            return fit(self.load_task(context), self.config, context)
