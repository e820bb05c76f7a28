"""What a lane of workers is like."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What the workers of a lane are; trials with the same one may share it."""

    num_workers: int
    resources: tuple[tuple[str, float], ...]
    """Of each worker."""
    strategy: str
    """Of their placement."""
    labels: tuple[tuple[tuple[str, str], ...], ...]
    """Labels that the node of each worker must have; empty: none."""
    runtime_env: str
    """As JSON: their runtime environment."""
