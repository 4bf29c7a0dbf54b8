"""The figures of merit, as pure functions of counters.

N is the number of generated tokens including the one from prefill, K the number of decode cycles including warm-up and
refill, n the number of stages, A, R and U the accepted, rejected and undrafted tokens. docs/metrics.md is the table of
them. This module knows neither arrays nor clocks.

Every ratio over several samples exists twice: pooled (ratio of the sums) and mean (mean of the ratios). They differ;
published tables use the mean; `acceptance_rates` gives both, labelled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


def _ratio(numerator: int | float, denominator: int) -> float:
    """0 where nothing was counted."""
    return numerator / denominator if denominator else 0.0


def _rate(numerator: int | float, denominator: int) -> float | None:
    """None where nothing was counted."""
    return numerator / denominator if denominator else None


def acceptance_rate(num_tokens: int, num_cycles: int) -> float | None:
    """(N - 1) / K, tokens a cycle: generated tokens without the one from prefill over decode cycles.

    None if K = 0: a sample of no token or one, which prefill gave, says nothing of decoding.
    """
    return _rate(num_tokens - 1, num_cycles)


def published_acceptance_rate(num_tokens: int, num_cycles: int) -> float | None:
    """N / K, tokens a cycle, as published: the token from prefill counts, its pass does not. None if K = 0."""
    return _rate(num_tokens, num_cycles)


def alpha(num_accepted: int, num_rejected: int) -> float:
    """A / (A + R), a fraction: drafts confirmed among drafts tested. Untested drafts and undrafted tokens stay out."""
    return _ratio(num_accepted, num_accepted + num_rejected)


def equivalent_accept_length(num_stages: int, rate: float | None) -> float | None:
    """S0 = n * rate, a ratio: the speedup if drafts and heads cost nothing and stages took equal time.

    None for a rate that is None. Autoregressive decoding has n = 1 and K = N - 1, hence S0 = 1.
    """
    return None if rate is None else num_stages * rate


def expected_cycles(num_tokens: int, num_stages: int, num_accepted: int, num_rejected: int) -> int:
    """K = n + A + n R cycles for N >= 2 tokens and W = 1, A and R counted among generated tokens 2..N-1.

    The first token comes from prefill, the last one's verdict ends the decode, so neither costs cycles of its own: n to
    fill, one for each accepted draft, n for each refill. No cycles for N <= 1; N - 1 for n = 1, which drafts nothing.

    Raises:
        ValueError: more verdicts than tokens, or for n >= 2 not exactly N - 2 of them.
    """
    if num_tokens <= 1:
        return 0
    if num_stages == 1:
        return num_tokens - 1
    if num_accepted + num_rejected != num_tokens - 2:
        raise ValueError(
            f"{num_tokens} tokens have {num_tokens - 2} verdicts among tokens 2..{num_tokens - 1}, found "
            f"{num_accepted} accepted and {num_rejected} rejected"
        )
    return num_stages + num_accepted + num_stages * num_rejected


def projected_accept_length(num_stages: int, alpha: float) -> float:
    """n / (1 + (1 - alpha)(n - 1)), a ratio: S0 of a long text if every draft is accepted with probability alpha."""
    return num_stages / (1 + (1 - alpha) * (num_stages - 1))


def eagle_tau(accepted_per_round: Sequence[int]) -> float:
    """EAGLE's tau, tokens a round: mean over rounds of accepted drafts + 1 (the target's own token). 0 if no round."""
    return _ratio(sum(accepted_per_round) + len(accepted_per_round), len(accepted_per_round))


def simulated_tau(accuracies: Sequence[float]) -> float:
    """1 + acc_1 + acc_1 acc_2 + ..., tokens a round: tau of a serial draft whose step i is right that often."""
    total, product = 1.0, 1.0
    for accuracy in accuracies:
        product *= accuracy
        total += product
    return total


@dataclasses.dataclass(frozen=True)
class Rates:
    """One ratio over several samples, both ways; None where no sample has one."""

    pooled: float | None
    mean: float | None


@dataclasses.dataclass(frozen=True)
class AcceptanceRates:
    """Acceptance rate and S0 over samples: without the token from prefill, and as published (N / K)."""

    rate: Rates
    published_rate: Rates
    s0: Rates
    published_s0: Rates


def acceptance_rates(samples: Sequence[tuple[int, int]], num_stages: int) -> AcceptanceRates:
    """Rates over samples of (N, K). A sample without cycles (one token) is in no mean and adds nothing to a pool."""
    used = [(tokens, cycles) for tokens, cycles in samples if cycles]
    pool = sum(cycles for _, cycles in used)

    def both(counted: Sequence[int], factor: int) -> Rates:
        ratios = [count / cycles for count, (_, cycles) in zip(counted, used, strict=True)]
        return Rates(_rate(factor * sum(counted), pool), _rate(factor * sum(ratios), len(ratios)))

    ours, published = [tokens - 1 for tokens, _ in used], [tokens for tokens, _ in used]
    return AcceptanceRates(both(ours, 1), both(published, 1), both(ours, num_stages), both(published, num_stages))
