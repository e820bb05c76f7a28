"""How fast a cluster reacts: until a dead node is noticed, and what a job may still do when it is stopped."""

import math
from collections.abc import Callable, Iterator

from cluster.finding import Finding, warning
from trainers.errors import MISSING

# Ray's own defaults (ray_config_def.h); with these a cut cable is noticed after 65 s at the latest, measured: 33 s.
_DEFAULTS = {"period_ms": 3000, "timeout_ms": 10000, "failure_threshold": 5}
_NOTICED_WITHIN_S = 20.0
_STOP_WAIT_S = 30.0


def reaction_findings(field: str, value_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Judge the head's settings; `value_of` gives the value of an environment variable there."""
    settings = {name: _number(value_of(f"RAY_health_check_{name}"), default) for name, default in _DEFAULTS.items()}
    slowest_s = settings["failure_threshold"] * (settings["period_ms"] + settings["timeout_ms"]) / 1000
    if slowest_s > _NOTICED_WITHIN_S:
        rule = f"should let a dead node be noticed within {_NOTICED_WITHIN_S:g} s, not {slowest_s:g}"
        names = ("period_ms=1000", "timeout_ms=1000", "failure_threshold=3")
        fix = f"export {', '.join(f'RAY_health_check_{name}' for name in names)}"
        yield warning(field, MISSING, rule, fix)
    wait_s = _number(value_of("RAY_JOB_STOP_WAIT_TIME_S"), 3)
    if wait_s < _STOP_WAIT_S:
        rule = f"should leave a stopped job {_STOP_WAIT_S:g} s or more for its last checkpoint, not {wait_s:g}"
        yield warning(field, MISSING, rule, "export RAY_JOB_STOP_WAIT_TIME_S=120")


def _number(text: str | None, default: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        return default
    return value if math.isfinite(value) else default
