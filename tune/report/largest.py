"""Whether the largest batch size lost to its learning rate or to itself, where that was
searched around.

Pure.
"""

from collections.abc import Collection, Sequence

from tune.config import BATCH_KEYS, SweepConfig, sample_values
from tune.report.words import amount, shown, span, telling
from tune.search.around import is_inside, scores_of
from tune.trials.record import TrialRecord, value_of


def largest_size(
    config: SweepConfig, records: Sequence[TrialRecord], as_good: Collection[str]
) -> str:
    """Return a sentence on the largest batch size; empty where no rate was searched
    around, or it was not tried.

    `as_good`: ids of the best trial, and of those that cannot be told apart from it.
    """
    key = next(
        (key for key in BATCH_KEYS if isinstance(config.space.get(key), list)), None
    )
    if key is None or config.around is None or not as_good:
        return ""
    size = max(sample_values(config.space[key]))
    tried = [
        record
        for record in records
        if record.purpose == "trial" and record.config.get(key) == size
    ]
    if not tried:
        return ""
    scores = scores_of(config.objective, tried)
    best = min(tried, key=lambda record: scores[record.id])
    rate = telling(config, records).get(config.around, config.around)
    who = f"largest batch, {size},"
    own = f"{rate} {shown(best.config[config.around])}"
    if not is_inside(config, tried, best.config):
        return f"Whether the {who} lost to its rate or to itself is not known: beyond its best, {own}, none was tried."
    if best.id not in as_good:
        return f"The {who} lost to itself, not to its rate: with its best, {own}, it has {_value(config, best)}."
    start = sample_values(config.space[config.around])[0]
    by_rule = next(
        (
            record
            for record in tried
            if record.config == {**best.config, config.around: start}
        ),
        best,
    )
    if by_rule.id in as_good:
        return f"The {who} did not lose: it is as good as the best with {own}."
    at_rule = f"with the rule's, {shown(start)}, it has {_value(config, by_rule)}"
    return f"The {who} is as good as the best with {own}, and loses to its rate otherwise: {at_rule}."


def _value(config: SweepConfig, record: TrialRecord) -> str:
    metric = config.objective.metric
    value = value_of(metric, record)
    if value is None:
        return f"no {metric}"
    if metric == "time_to_target":
        return f"a time to the target of {span(record.missed_target_s, value)}"
    return f"{metric} {amount(metric, value)}"
