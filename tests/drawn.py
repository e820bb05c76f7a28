"""What hypothesis draws: some dozens of inputs, always the same ones;
thousands by `--hypothesis-profile faults`.
"""

from hypothesis import HealthCheck, settings

_BOTH = {"database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile(
    "suite", max_examples=25, derandomize=True, deadline=None, **_BOTH
)
settings.register_profile("faults", max_examples=2500, deadline=5000, **_BOTH)
settings.load_profile("suite")
