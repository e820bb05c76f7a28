"""Where the steps of a sweep's best trial spend their time, as the report shows it."""

import logging
from dataclasses import dataclass

from trainers.errors import CheckpointError
from trainers.explain.advice import Explanation
from trainers.storage import Storage

logger = logging.getLogger(__name__)

FILE = "explanation.json"


@dataclass(frozen=True)
class Explained:
    """The explanation, and of which trial it is."""

    trial: str
    explanation: Explanation


def read_explained(sweep: Storage) -> Explained | None:
    """Return what the sweep has kept; None where there is none, or it cannot be read."""
    try:
        return sweep.read_json(FILE, Explained, finite=False) if sweep.exists(FILE) else None
    except CheckpointError as error:
        logger.warning("%s; the report does not show it", error)
        return None
