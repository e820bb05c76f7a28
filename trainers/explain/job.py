"""An explanation as a job for workers that are there already; whoever gives it to them imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from trainers.context import RunContext
from trainers.explain.advice import Explanation
from trainers.json_data import validated
from trainers.launch.spec import Job


@dataclass(frozen=True)
class ExplainJob(Job[Explanation]):
    """Says where the time of the configuration's steps goes, by a profile alone."""

    seconds: float
    """What the steps of the profile take."""

    def execute(self, context: RunContext) -> Explanation:
        """Profile as one worker; the result is rank 0's."""
        from trainers.explain.explanation import explanation_of
        from trainers.explain.profile import ProfileJob

        return explanation_of(self.source, self.config, ProfileJob(**asdict(self)).execute(context))

    def read_result(self, text: bytes) -> Explanation:
        """Parse what `execute` returned on rank 0."""
        return validated(json.loads(text), Explanation)
