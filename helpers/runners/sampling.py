"""Sampling: how the next token of each sequence is chosen from the logits, for all sequences of a pass at once.

Greedy decoding (temperature 0) takes the best token. Otherwise a token is drawn: one random number between 0 and 1
falls into the share that the token's probability takes of that range. The number is a function of the request's seed,
the output's index and the token's place, so it depends neither on other requests nor on how often a token is chosen. A
draft is verified with the same numbers: it is kept for as long as its tokens are those that are chosen anyway.

Features may change the logits of their requests first (`engine/hooks.py`).
"""

import itertools
import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..engine import Chunk, LogitsRule, SampledToken, SamplingParams, Sequence

Choice = SampledToken | Exception  # of one sequence: its parameters must not make others fail
GROUP = 256  # tokens whose probabilities are added up at once
LOWEST_TEMPERATURE = 0.01  # below, logits can overflow, and the best token is drawn in any case


class BatchSampler:
    """Chooses the tokens of all sequences in a forward pass."""

    def __init__(self):
        self._rules: WeakKeyDictionary[Sequence, list[LogitsRule]] = WeakKeyDictionary()

    def sample(self, chunks: list[Chunk], logits: torch.Tensor) -> dict[Sequence, list[Choice]]:
        """Return new tokens for every chunk with `samples_token`: one, and one more for each accepted draft token.

        Args:
            chunks: the chunks of a forward pass.
            logits: [sum of `num_logits`, vocabulary], in the order of the chunks.

        Returns:
            The tokens of each of these sequences. An exception that was raised while choosing one is the last of them.
        """
        pending, end = [], 0  # the chunks, each with the row of the logits after its newest token
        for chunk in chunks:
            end += chunk.num_logits
            if chunk.samples_token:
                pending.append((chunk, end - 1 - len(chunk.draft_token_ids)))
        greedy = any(chunk.sequence.params.temperature == 0 for chunk, _ in pending)
        best = logits.max(dim=-1).indices.tolist() if greedy else []  # faster than argmax on a CPU
        sampled, depth = {chunk.sequence: [] for chunk, _ in pending}, 0  # how many draft tokens are accepted
        while pending:
            choices = zip(pending, self._choose(pending, depth, logits, best), strict=True)
            pending = []
            for (chunk, row), choice in choices:
                sampled[chunk.sequence].append(choice)
                if isinstance(choice, SampledToken) and chunk.draft_token_ids[depth : depth + 1] == [choice.token_id]:
                    pending.append((chunk, row))  # another token follows the draft
            depth += 1
        return sampled

    def _choose(self, pending: list, depth: int, logits: torch.Tensor, best: list[int]) -> list[Choice]:
        """Return a choice for each (chunk, row after its newest token), of whose drafts `depth` tokens are accepted."""
        choices = [
            SampledToken(best[row + depth]) if self._takes_best(chunk, depth, best, row + depth) else None
            for chunk, row in pending
        ]
        if others := [pair for pair, choice in zip(pending, choices, strict=True) if choice is None]:
            found = iter(self._choose_others(others, depth, logits))
            choices = [choice or next(found) for choice in choices]
        return choices

    def _takes_best(self, chunk: Chunk, depth: int, best: list[int], row: int) -> bool:
        """Return whether the best token of a row is the choice, without a look at other logits."""
        params = chunk.sequence.params
        if params.temperature > 0 or params.logprobs is not None:
            return False
        rules = self._rules_of(chunk.sequence)
        return not rules or (len(rules) == 1 and _allows(rules[0], _known(chunk, depth), best[row]))

    def _choose_others(self, pending: list, depth: int, logits: torch.Tensor) -> list[Choice]:
        """Return a choice for each chunk where the best token does not do; the arguments are those of `_choose`."""
        chunks, rows = [chunk for chunk, _ in pending], [row + depth for _, row in pending]
        raw = (logits if rows == list(range(len(logits))) else logits[rows]).float().cpu()
        params = [chunk.sequence.params for chunk in chunks]
        rules_of_rows = {row: rules for row, chunk in enumerate(chunks) if (rules := self._rules_of(chunk.sequence))}
        scores, errors, drawn = raw, {}, [row for row, row_params in enumerate(params) if row_params.temperature > 0]
        if rules_of_rows:
            scores = raw.clone()  # features and log-probabilities read the model's own
            for row, rules in rules_of_rows.items():
                try:
                    for rule in rules:
                        rule.change(_known(chunks[row], depth), scores[row])
                except Exception as error:
                    errors[row], scores[row] = error, 0
        token_ids = [0] * len(chunks)
        if rules_of_rows or len(drawn) < len(chunks):
            highest, best = scores.max(dim=-1)
            token_ids, highest = best.tolist(), highest.tolist()
            for row in rules_of_rows:
                if highest[row] == -torch.inf:
                    errors[row] = ValueError("The parameters of the request exclude every token here: relax them.")
        if drawn:
            all_drawn = len(drawn) == len(chunks)
            probabilities = probabilities_of(scores if all_drawn else scores[drawn], [params[row] for row in drawn])
            for row, shares in zip(drawn, probabilities, strict=True):
                sequence = chunks[row].sequence
                key = (sequence.request.seed + sequence.index) % 2**63, sequence.generated + depth
                numbers = (random_number(*key, attempt) for attempt in itertools.count())
                try:
                    token_ids[row] = draw_from_top(shares, float(params[row].top_p), numbers)
                except ValueError as error:
                    errors.setdefault(row, error)
        reported = _logprobs(raw, params, token_ids)
        return [errors.get(row) or SampledToken(token_ids[row], reported.get(row)) for row in range(len(chunks))]

    def _rules_of(self, sequence: Sequence) -> list[LogitsRule]:
        if not sequence.request.features:
            return []
        if sequence not in self._rules:
            rules = [feature.logits_rule(sequence) for feature in sequence.request.features]
            self._rules[sequence] = sorted((rule for rule in rules if rule is not None), key=lambda rule: rule.is_last)
        return self._rules[sequence]


def read_logits(chunks: Iterable[Chunk], logits: torch.Tensor) -> dict:
    """Return what features read from the logits of a pass, by sequence and name; see `Feature.read_logits`."""
    readings, end = {}, 0
    for chunk in chunks:
        start, end = end, end + chunk.num_logits
        for feature in chunk.sequence.request.features:
            reading = feature.read_logits(chunk, logits[start:end])
            if reading is not None:
                readings[chunk.sequence, feature.name] = reading
    return readings


def random_number(seed: int, position: int, attempt: int = 0) -> float:
    """Return a number from 0 up to, not including, 1, which looks random and depends on nothing but these numbers."""
    digest = blake2b(struct.pack("<3Q", seed, position, attempt), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def draw_from_top(probabilities: np.ndarray, top_p: float, numbers: Iterator[float]) -> int:
    """Draw a token from the smallest set of best tokens whose probabilities add up to at least `top_p`.

    Nothing is sorted. A token belongs to the set if all better ones add up to less than `top_p`. If the token that was
    drawn does not belong, neither do those that are no better: they are excluded, and a token is drawn again. The
    result has the same distribution. FlashInfer samples this way, too (Ye et al., MLSys 2025).

    Args:
        probabilities: float32 [vocabulary]; their sum need not be 1; changed in place.
        top_p: above 0; 1 for all tokens.
        numbers: random numbers from 0 up to, not including, 1.

    Raises:
        ValueError: the probabilities are not numbers.
    """
    total = probabilities.sum()
    while True:
        token_id = draw(probabilities, next(numbers))
        limit = probabilities[token_id]
        better = probabilities > limit
        share_of_better = np.dot(probabilities, better)
        if top_p >= 1 or share_of_better < top_p * total or share_of_better == 0:  # the best token always belongs
            return token_id
        probabilities *= better


def draw(probabilities: np.ndarray, number: float) -> int:
    """Return the token into whose share of the range from 0 to 1 a random number falls.

    The sums of groups of tokens find the group first, so that only its tokens are added up one by one.

    Args:
        probabilities: float32 [vocabulary]; their sum need not be 1.
        number: from 0 up to, not including, 1.

    Raises:
        ValueError: the probabilities are not numbers.
    """
    groups = np.arange(0, len(probabilities), GROUP)
    ends = np.cumsum(np.add.reduceat(probabilities, groups), dtype=np.float64)
    if not np.isfinite(ends[-1]):
        raise ValueError("The model's logits are not numbers (NaN).")
    target = number * ends[-1]
    group = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
    start = group * GROUP
    within = np.cumsum(probabilities[start : start + GROUP], dtype=np.float64)
    index = int(np.searchsorted(within, target - (ends[group - 1] if group else 0), side="right"))
    if index == len(within):  # rounding has left the number beyond the last token of the group
        index = int(np.flatnonzero(probabilities[start : start + GROUP])[-1])
    return start + index


def probabilities_of(scores: torch.Tensor, params: list[SamplingParams]) -> np.ndarray:
    """Return the probabilities of tokens after temperature, `top_k` and `min_p`, float32 [rows, vocabulary].

    Args:
        scores: float32 [rows, vocabulary], on the CPU.
        params: the temperature, `top_k` and `min_p` of each row.
    """
    temperatures = torch.tensor([max(float(row_params.temperature), LOWEST_TEMPERATURE) for row_params in params])
    probabilities = (scores / temperatures[:, None]).softmax(dim=-1).numpy()
    for shares, row_params in zip(probabilities, params, strict=True):
        if 0 < row_params.top_k < len(shares):
            shares *= shares >= np.partition(shares, -int(row_params.top_k))[-int(row_params.top_k)]
        if row_params.min_p > 0:
            shares *= shares >= float(row_params.min_p) * shares.max()
    return probabilities


def _known(chunk: Chunk, depth: int) -> list[int]:
    """Return the tokens after which the next one is chosen."""
    return chunk.sequence.token_ids + chunk.draft_token_ids[:depth] if depth else chunk.sequence.token_ids


def _allows(rule: LogitsRule, token_ids: list[int], next_id: int) -> bool:
    """Return whether a rule lets the best token be chosen; False if it fails, which `change` says of its row alone."""
    try:
        return rule.allows(token_ids, next_id) is True
    except Exception:
        return False


def _logprobs(logits: torch.Tensor, params: list[SamplingParams], token_ids: list[int]) -> dict[int, dict[int, float]]:
    """Return the log-probabilities that are asked for, by row: of the chosen token, and of the best ones.

    They are computed from the model's logits, before penalties, temperature and truncation.
    """
    rows = [row for row, row_params in enumerate(params) if row_params.logprobs is not None]
    if not rows:
        return {}
    logprobs = (logits if len(rows) == len(logits) else logits[rows]).log_softmax(dim=-1)
    best = logprobs.topk(min(max(params[row].logprobs for row in rows), logprobs.shape[1]))
    return {
        row: {
            token_ids[row]: own[token_ids[row]].item(),
            **dict(zip(ids[: params[row].logprobs], values[: params[row].logprobs], strict=True)),
        }
        for row, own, ids, values in zip(rows, logprobs, best.indices.tolist(), best.values.tolist(), strict=True)
    }
