"""The job that trains a run with our loop, as one worker."""

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
            try:
                return fit(self.load_task(context), self.config, context)
            except SystemExit as error:
                # A lane raises a subclass to stop a trial.
                if type(error) is not SystemExit:
                    raise
                # Otherwise the command would exit with this code, maybe 0.
                words = (
                    f"the task ended the process with exit code {error.code!r}"
                )
                failure = RuntimeError(words)
                raise failure.with_traceback(error.__traceback__) from None
