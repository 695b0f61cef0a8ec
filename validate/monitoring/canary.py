"""A canary: does a candidate accept as much as a baseline, both serving a share of one traffic?

Requests are not paired, but both servers see the same mixture of them at the same time. So each
block of readings compares the two by itself, D = candidate - (1 - drop) x baseline, and blocks are
weighted by what they know, w = 1 / variance of D. Then S = sum of w D is a random walk whose
variance is V = sum of w, and whose mean is 0 where the candidate lost just the tolerated
drop.

A bet of stake s on a gain makes exp(s S - s^2 V / 2) of 1, one on a loss exp(-s S - s^2 V / 2). The
mean over some stakes is an e-process: it ever exceeds 1 / alpha with a probability of at most
alpha, however often it is looked at (Ville's inequality), so that
a verdict may be given as soon as it does.
Source: Howard, Ramdas, McAuliffe, Sekhon, "Time-uniform Chernoff bounds via nonnegative
supermartingales", Probability Surveys 17 (2020), 257-317, doi 10.1214/18-PS321, for the process;
Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic
confidence sequences", The Annals of Statistics 52 (2024), 2613-2640, doi 10.1214/24-AOS2408, for
why the variance may be an estimate: the guarantee is asymptotic, in numbers of requests.

The variance of a step is golden's, with its design effect: whole requests are independent, their
steps are not. Where blocks differ by more than that, V and S are divided by how much more.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from ..errors import GoldenError
from ..golden.golden import Golden
from ..judging.policy import POLICIES

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
DISTANCES = (0.005, 0.01, 0.02, 0.04)
"""Relative distances from the limit, each of which one bet finds fastest."""
FEWEST_REQUESTS = POLICIES["release"].min_prompts
"""Of each server before any verdict, as many as the gate asks for; of golden, to know how much they
vary."""
_BLOCK_REQUESTS = 4
"""Of each server, in verify steps of golden's requests, before a block is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What one server counted.

    Attributes:
        verify_steps, accepted: of all readings; accepted are draft tokens.
        waiting_steps, waiting_accepted: of them those that no block has yet.
    """

    verify_steps: float = 0
    accepted: float = 0
    waiting_steps: float = 0
    waiting_accepted: float = 0

    def counted(self, verify_steps: float, accepted: float) -> "Arm":
        """With what was counted since."""
        return Arm(
            verify_steps=self.verify_steps + verify_steps,
            accepted=self.accepted + accepted,
            waiting_steps=self.waiting_steps + verify_steps,
            waiting_accepted=self.waiting_accepted + accepted,
        )

    def judged(self) -> "Arm":
        """Nothing waits."""
        return Arm(verify_steps=self.verify_steps, accepted=self.accepted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Of all readings; None without verify steps."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Where a canary stands.

    Attributes:
        baseline, candidate: what they counted.
        blocks: that were compared.
        weighted: S. information: V. squares: sum of w D^2.
    """

    baseline: Arm = Arm()
    candidate: Arm = Arm()
    blocks: int = 0
    weighted: float = 0
    information: float = 0
    squares: float = 0

    @property
    def dispersion(self) -> float:
        """Variance between blocks over the one that golden's requests make; 1 at least."""
        if self.blocks < 2:
            return 1.0
        between = self.squares - self.weighted**2 / self.information
        return max(1.0, between / (self.blocks - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a comparison says.

    Attributes:
        verdict: "INCONCLUSIVE" as long as there is none.
        change: relative, of the acceptance length; None without a block.
        low, high: one-sided bounds of it, each valid at all times together; None without a block.
        evidence_pass, evidence_fail: how strongly the counts speak for either.
        verdict_at: from which on that is one.
    """

    verdict: Verdict
    change: float | None
    low: float | None
    high: float | None
    evidence_pass: float
    evidence_fail: float
    verdict_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How two servers are compared.

    Attributes:
        num_draft_tokens: K of golden.
        mean: golden's mean acceptance length.
        variance: of the mean over verify steps, times their number.
        request_steps: verify steps of a request, in the mean.
        max_drop: relative drop that is tolerated, in (0, 1).
        confidence: of either verdict, in (0.5, 1).
    """

    num_draft_tokens: int
    mean: float
    variance: float
    request_steps: float
    max_drop: float
    confidence: float

    @classmethod
    def of(cls, golden: Golden, *, max_drop: float, confidence: float) -> "Rule":
        """For requests like golden's.

        Raises:
            GoldenError: golden does not say how much its requests differ.
        """
        own = golden.all
        if own.clusters < FEWEST_REQUESTS or not own.design_effect:
            raise GoldenError(
                "golden acceptance",
                f"expected {FEWEST_REQUESTS} prompts or more that differ, got {own.clusters}: it"
                " does not say how much requests differ",
                fix="write it of more prompts (draftquant replay --golden)",
            )
        return cls(
            num_draft_tokens=golden.num_draft_tokens,
            mean=own.mean_acceptance_length,
            variance=own.variance_of_step * own.design_effect,
            request_steps=own.verify_steps / own.prompts,
            max_drop=max_drop,
            confidence=confidence,
        )

    @property
    def fewest_steps(self) -> float:
        """Verify steps of each server before any verdict."""
        return FEWEST_REQUESTS * self.request_steps

    def block(self, before: Comparison) -> Comparison:
        """Compare what waits, if both servers counted enough of it."""
        ours, theirs = before.candidate, before.baseline
        fewest = _BLOCK_REQUESTS * self.request_steps
        if min(ours.waiting_steps, theirs.waiting_steps) < fewest:
            return before
        kept = 1 - self.max_drop
        difference = (1 + ours.waiting_accepted / ours.waiting_steps) - kept * (
            1 + theirs.waiting_accepted / theirs.waiting_steps
        )
        weight = 1 / (self.variance * (1 / ours.waiting_steps + kept**2 / theirs.waiting_steps))
        return Comparison(
            baseline=theirs.judged(),
            candidate=ours.judged(),
            blocks=before.blocks + 1,
            weighted=before.weighted + weight * difference,
            information=before.information + weight,
            squares=before.squares + weight * difference**2,
        )

    def judge(self, found: Comparison) -> Judged:
        """The verdict so far."""
        alpha, baseline = 1 - self.confidence, found.baseline.mean_acceptance_length
        weighted = found.weighted / found.dispersion
        information = found.information / found.dispersion
        verdict, gain, loss = self.verdict(found)
        change = low = high = None
        if information and baseline is not None:
            beyond = self._beyond(information)
            change, low, high = (
                float(one / information / baseline - self.max_drop)
                for one in (weighted, weighted - beyond, weighted + beyond)
            )
        return Judged(
            verdict=verdict, change=change, low=low, high=high,
            evidence_pass=math.exp(min(gain, 700.0)), evidence_fail=math.exp(min(loss, 700.0)),
            verdict_at=1 / alpha,
        )  # fmt: skip

    def verdict(self, found: Comparison) -> tuple[Verdict, float, float]:
        """The verdict so far, and the logarithms of the evidence for PASS and for FAIL."""
        weighted = found.weighted / found.dispersion
        information = found.information / found.dispersion
        gain = self._log_evidence(weighted, information)
        loss = self._log_evidence(-weighted, information)
        steps = min(found.baseline.verify_steps, found.candidate.verify_steps)
        needed = -math.log(1 - self.confidence)
        if steps < self.fewest_steps or max(gain, loss) < needed:
            return "INCONCLUSIVE", gain, loss
        return ("PASS" if gain > loss else "FAIL"), gain, loss

    def _log_evidence(self, weighted: float, information: float) -> float:
        stakes = np.array(DISTANCES) * self.mean
        logs = stakes * weighted - stakes**2 * information / 2
        return float(logsumexp(logs)) - math.log(len(stakes))

    def _beyond(self, information: float) -> float:
        """S at which the evidence is just that of a verdict."""
        smallest = DISTANCES[0] * self.mean
        needed = -math.log(1 - self.confidence)
        enough = (needed + math.log(len(DISTANCES))) / smallest + smallest * information / 2
        found = brentq(lambda one: self._log_evidence(one, information) - needed, 0.0, enough)
        return float(found)
