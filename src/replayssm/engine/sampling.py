"""Which token comes next: penalties, filters, and draws that depend on nothing but seed, position and probabilities.

A draw is the maximum of log-probability plus Gumbel noise, and the noise is a hash of (seed, position, token). So a
sequence is the same in every batch, and a draft is verified by drawing: the token that the target draws there is the
one that is taken, and a draft was right if it is that token. Whatever drafts, the text has the target's distribution,
and it is even the same text. A draft model that draws with the same noise is right more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .request import Logprob, Params

_MASK = (1 << 64) - 1
# Lower temperatures draw as this one does, which is greedy; float32 has no number for the lowest.
_COLDEST = 1e-30


@dataclass(frozen=True)
class Point:
    """One place where a token is chosen.

    Attributes:
        params: of the request.
        seed: of the sample.
        position: in the sequence, of the token that is chosen.
        prompt: token ids.
        output: tokens between the prompt and this place, drafts on the way here included.
    """

    params: Params
    seed: int
    position: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    @property
    def plain(self) -> bool:
        """Whether it is the token with the largest logit."""
        return self.params.temperature == 0 and not self.params.penalised


class Filters(NamedTuple):
    """The parameters of M draws, each [M]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def choose(logits: Tensor, points: Sequence[Point]) -> list[int]:
    """The token at each point.

    Args:
        logits: [M, vocabulary] of any dtype.
        points: M.
    """
    return chosen(logits, points).tolist()


def chosen(logits: Tensor, points: Sequence[Point]) -> Tensor:
    """As ``choose``: int64 [M], where the logits are."""
    scores = penalise(logits, points)
    found = scores.argmax(-1)
    drawn = [i for i, point in enumerate(points) if point.params.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        found[index] = _draw(scores[index], [points[i] for i in drawn], 1)[:, 0]
    return found


def branches(logits: Tensor, points: Sequence[Point], number: int) -> list[list[int]]:
    """The ``number`` likeliest choices at each point, in order: those that a draft should try."""
    scores = penalise(logits, points)
    found = scores.topk(number, -1).indices
    drawn = [i for i, point in enumerate(points) if point.params.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        found[index] = _draw(scores[index], [points[i] for i in drawn], number)
    return found.tolist()


def penalise(logits: Tensor, points: Sequence[Point]) -> Tensor:
    """Logits [M, vocabulary] in float32 with each point's penalties."""
    scores = logits.float()
    rows = [i for i, point in enumerate(points) if point.params.penalised]
    if not rows:
        return scores
    scores = scores.clone()
    for i in rows:
        point = points[i]
        counts = scores.new_zeros(scores.shape[1])
        # Not bincount, which waits for the device.
        counts.index_add_(0, _tokens(point.output, scores), scores.new_ones(len(point.output)))
        seen = counts.bool()
        seen[_tokens(point.prompt, scores)] = True
        factor = point.params.repetition_penalty
        line = torch.where(seen, torch.where(scores[i] > 0, scores[i] / factor, scores[i] * factor), scores[i])
        line -= point.params.frequency_penalty * counts + point.params.presence_penalty * counts.bool()
        scores[i] = line
    return scores


def filtered(scores: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """What is drawn from, likeliest token first.

    Args:
        scores: [M, vocabulary] float32.
        filters: of each row; applied in the order temperature, top-k, top-p, min-p.

    Returns:
        Log-probabilities [M, kept], −inf where a token is left out, not normalised after top-p and min-p; and the token
        ids [M, kept].
    """
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    # The likeliest token is at 0: no temperature makes it infinite.
    ordered = (ordered - ordered[:, :1]) / filters.temperature.clamp(min=_COLDEST)[:, None]
    rank = torch.arange(scores.shape[1], device=scores.device)
    most = torch.where(filters.top_k > 0, filters.top_k, scores.shape[1])
    ordered = ordered.masked_fill(rank >= most[:, None], -torch.inf)
    logs = ordered.log_softmax(-1)
    probabilities = logs.exp()
    before = probabilities.cumsum(-1) - probabilities
    # A filter of 1 keeps everything, whatever rounding makes of the sum.
    out = (before >= filters.top_p[:, None]) & (filters.top_p[:, None] < 1)
    out |= probabilities < filters.min_p[:, None] * probabilities[:, :1]
    logs = logs.masked_fill(out, -torch.inf)
    kept = most_kept(logs, filters)
    return logs[:, :kept], ids[:, :kept]


def most_kept(logs: Tensor, filters: Filters) -> int:
    """How many of the first tokens are enough for every row; on a GPU, where counting them would wait, all."""
    if logs.device.type == "cpu":
        return max(1, int((logs > -torch.inf).sum(-1).max()))  # logits that are no numbers keep none
    return logs.shape[1]


def gumbel(keys: Sequence[int], ids: Tensor) -> Tensor:
    """Gumbel noise [M, n] in float64 for the token ids [M, n]; ``keys``: one 64-bit number a row."""
    x = torch.tensor([_signed(key) for key in keys], device=ids.device)[:, None] ^ (ids * -7046029254386353131)
    for factor in (-49064778989728563, -4265267296055464877):
        x = (x ^ _shift(x, 33)) * factor
    x = _shift(x ^ _shift(x, 33), 11)
    uniform = (x.double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def mix(*numbers: int) -> int:
    """A 64-bit key from numbers (splitmix64)."""
    key = 0
    for number in numbers:
        key = (key + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def logprob(logits: Tensor, token: int, number: int) -> Logprob:
    """Log-probabilities of ``token`` and of the ``number`` likeliest ones at logits [vocabulary]."""
    logs = logits.float().log_softmax(-1)
    top = logs.topk(number)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Logprob(float(logs[token]), tuple(pairs))


def _draw(scores: Tensor, points: Sequence[Point], number: int) -> Tensor:
    """Token ids [M, number]: the first one is the draw, the others what it would be if that were not there."""
    columns = zip(
        *((p.params.temperature, p.params.top_k, p.params.top_p, p.params.min_p) for p in points), strict=True
    )
    filters = Filters(*(torch.tensor(column, device=scores.device) for column in columns))
    logs, ids = filtered(scores, filters)
    noise = gumbel([mix(point.seed, point.position) for point in points], ids)
    best = (logs.double() + noise).topk(min(number, logs.shape[1]), -1)
    found = ids.gather(1, best.indices)
    # Fewer tokens than branches are left: the first one stands for the others.
    found = torch.where(best.values > -torch.inf, found, found[:, :1])
    return torch.cat([found, found[:, :1].expand(-1, number - found.shape[1])], 1)


def _tokens(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key
