"""What ends the function of a trial that was stopped."""


class TrialStopped(SystemExit):
    """Ends a training function at its report, and the function of its trial, once the search has stopped the trial."""
