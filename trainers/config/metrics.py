"""Names of metrics: which direction is better, and whether an evaluation has one."""

import re
from collections.abc import Iterable
from typing import Literal

from trainers.errors import MISSING, ConfigError, did_you_mean, nearest

Mode = Literal["min", "max"]
"""Whether less or more of a metric is better."""

_LESS_IS_BETTER = """
    loss error err mae mse rmse mape smape wape mase msle rmsle mdae nrmse nll nllloss bce ce kl kld cross_entropy
    divergence deviance perplexity ppl bpb bpc bpd bits_per_byte bits_per_char bits_per_dim wer cer per ter mer
    word_error_rate fid kid lpips crps ece brier hinge eer fpr fnr fdr false_positive false_negative false_discovery
    mpjpe epe ade fde davies_bouldin aic bic regret neg_log_likelihood negative_log_likelihood neg_elbo
    negative_elbo hamming hausdorff wasserstein levenshtein edit_distance time_to_target usd_to_target energy_j
    memory_bytes peak_memory_bytes time_s time_ms latency latency_s latency_ms
"""
_MORE_IS_BETTER = """
    accuracy acc f1 f2 fbeta fscore fmeasure auc auroc auprc aupr precision recall sensitivity specificity tpr tnr ppv
    npv true_positive true_negative positive_predictive negative_predictive ap map mar iou miou dice jaccard pq kappa
    mcc matthews matthews_corrcoef r2 explained_variance likelihood loglik elbo bleu sacrebleu rouge rougel rougelsum
    meteor chrf cider spice bertscore ndcg mrr hit_rate hits exact_match em psnr ssim msssim snr sdr sisdr stoi pesq
    similarity correlation pearson spearman kendall pearsonr spearmanr concordance silhouette calinski_harabasz ari nmi
    inception_score clip_score reward return win_rate success samples_per_s samples_per_second tokens_per_s
    tokens_per_second throughput
"""
_KNOWN: dict[str, Mode] = {
    **dict.fromkeys(_LESS_IS_BETTER.split(), "min"),
    **dict.fromkeys(_MORE_IS_BETTER.split(), "max"),
}
_ENDS = (
    "loss",
    "error",
    "mse",
    "mae",
    "mape",
    "accuracy",
    "auc",
    "auroc",
    "iou",
    "perplexity",
)
"""Known also where something is written in front of them without a break: celoss,
prauc.
"""
_SPLITS = ("val", "valid", "validation", "test", "eval", "dev", "train")
_QUALIFIERS = """
    mean avg average median macro micro weighted binary multiclass multilabel total overall all epoch step ema
    score rate index value coefficient coef percent pct at k s top
"""
_SAY_NOTHING = {*_SPLITS, *_QUALIFIERS.split()}
"""Words after which the one in front of them decides."""
_TURNS = {"neg", "negative", "minus", "inverse", "inv"}
_DENIALS = {*_TURNS, "in", "un", "non"}
"""In front of a name without a break: negmse, inaccuracy."""
_OF_WHAT = ("at", "per")
"""The words after them say where or of what alone: tpr_at_fpr, reward_per_step."""
_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
_MINUS = re.compile(r"(?<![a-z0-9])(1 ?)?- ?(?=[a-z])")
_LONG = 6  # letters of a word that can be told from others by most of them
_LONGEST = 3  # words of a name in the table


def direction_of(metric: str) -> Mode | None:
    """Return whether less or more of a metric is better, by its name.

    The last word that says it decides; None where none does.

    scikit-learn's `neg_` is in front of losses whose sign it has turned.
    """
    plain = _MINUS.sub("minus_", _BREAK.sub("_", metric).lower()).replace("@", "_at_")
    words = _measured(re.findall(r"[a-z]+\d*|\d+", plain))
    if set(words) <= _SAY_NOTHING:  # scikit-learn: of a score more is better
        return "max" if "score" in words else None
    for end in range(len(words), 0, -1):
        for start in range(max(0, end - _LONGEST), end):
            if (found := _known("_".join(words[start:end]))) is not None:
                return _turned(
                    found, [word for word in words[:start] if word not in _SPLITS]
                )
        last = words[end - 1].rstrip("0123456789")
        if last and last not in _SAY_NOTHING:
            return None
    return None


def _measured(words: list[str]) -> list[str]:
    """The words in front of `at` or `per`, where they are more than qualifiers."""
    for place in range(1, len(words) - 1):
        is_name = "_".join(words[place - 1 : place + 2]) in _KNOWN
        if (
            words[place] in _OF_WHAT
            and not is_name
            and not set(words[:place]) <= _SAY_NOTHING
        ):
            return words[:place]
    return words


def _known(name: str) -> Mode | None:
    """Look up a word or a few, also where they are numbered: acc1, rouge2, map50."""
    bare = name.rstrip("0123456789")
    found = _KNOWN.get(name) or _KNOWN.get(bare)
    if found is None and "_" not in name:
        ends = (
            end
            for end in _ENDS
            if bare.endswith(end) and bare.removesuffix(end) not in _DENIALS
        )
        found = next((_KNOWN[end] for end in ends), None)
    return found


def _turned(found: Mode, before: list[str]) -> Mode | None:
    """Return what is better where these words stand in front of a name.

    Only of a loss's `neg_` is the sign known.
    """
    if not _TURNS.intersection(before):
        return found
    return "max" if before[0] == "neg" and found == "min" else None


def check_direction(key: str, metric: str, mode: Mode | None) -> None:
    """Raise ConfigError where neither `mode` nor the metric's name says what is better."""
    if mode is None and direction_of(metric) is None:
        rule = f"is required: the name {metric} does not say whether less or more is better"
        leaf = key.rpartition(".")[2]
        fix = f"add `{leaf}: min` or `{leaf}: max`"
        near = _meant(metric)
        raise ConfigError(
            key, MISSING, rule, f"did you mean `{near}`? Else {fix}" if near else fix
        )


def _meant(metric: str) -> str | None:
    """Return the known name that a misspelt one is nearest to, or None.

    It may be near as a whole, or in its last word.
    """
    last = metric.rpartition("_")[2]
    for name in (metric, last):
        if (near := nearest(name, _KNOWN, cutoff=0.85)) is not None:
            return metric.removesuffix(name) + near
    near = (
        nearest(last, [name for name in _KNOWN if len(name) >= _LONG])
        if len(last) >= _LONG
        else None
    )
    return None if near is None else metric.removesuffix(last) + near


def check_metric(key: str, metric: str, figures: Iterable[str]) -> None:
    """Raise ConfigError where an evaluation has no figure of the metric's name."""
    names = sorted(figures)
    if metric not in names:
        fix = did_you_mean(metric, names, f"use one of {', '.join(names)}")
        raise ConfigError(key, metric, "is no metric of this task's evaluation", fix)
