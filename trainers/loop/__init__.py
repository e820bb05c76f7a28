"""Build, train and watch one worker's run."""
