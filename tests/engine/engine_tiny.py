"""What the engine's tests share: solo runs to compare with, and a drafter that is right as often as a test wants."""

import random
from functools import cache

import torch
from transformers_tiny import NAMES, prompt, stock

from replayssm import models
from replayssm.engine import Draft, Engine, Params, Request

INDEXED = ("qwen4_exp", "glm5_next")
SERVED = [name for name in NAMES if name not in INDEXED]
LENGTHS = (1, 3, 9, 21)


def prompts(lengths=LENGTHS) -> list[list[int]]:
    return [prompt(1, length, seed=length)[0].tolist() for length in lengths]


def solo(model, ids: list[int], new: int) -> list[int]:
    """What ``model.generate`` says alone, greedily."""
    return model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()


@cache
def tiny(name: str = "qwen3_next"):
    """A model, and greedy continuations of ``prompts()``: the i-th has 8 + i tokens."""
    model = stock(name)
    return model, [solo(model, ids, 8 + i) for i, ids in enumerate(prompts())]


def lengthy(count: int = len(LENGTHS), **options) -> list[Params]:
    return [Params(max_tokens=8 + i, **options) for i in range(count)]


@cache
def boxed():
    """The shipped model in float32 (in bfloat16 greedy ties are common), its tokenizer, and texts."""
    model, tokenizer = models.load(models.DEFAULT, dtype=torch.float32)
    return model, tokenizer, [text for text in models.heldout() if len(text) > 400]


def engine(model, **options) -> Engine:
    return Engine(model, **{"slots": 3, "max_length": 64, "window": 8, "chunk": 8, **options})


def texts(requests: list[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


class Oracle:
    """Knows the texts, and errs on purpose: chains or trees of every size, right or wrong anywhere."""

    cost = 0.1

    def __init__(self, wanted: dict[tuple[int, ...], list[int]], branching: bool = False, errs: float = 0.2):
        self.wanted, self.branching, self.errs, self.random = wanted, branching, errs, random.Random(0)
        self.keys = set()
        self.closed = False

    def bind(self, model, slots, max_length, max_draft):
        self.max_draft = max_draft

    def close(self):
        self.closed = True

    def forget(self, key):
        self.keys.discard(key)

    def propose(self, asks):
        self.keys |= {ask.key for ask in asks}
        return [self._one(ask) for ask in asks]

    def _one(self, ask):
        assert 1 <= ask.depth <= ask.limit < self.max_draft
        prompt = next(p for p in self.wanted if list(p) == ask.tokens[: len(p)])
        rest = self.wanted[prompt][len(ask.tokens) - len(prompt) :]
        draft, at = Draft(), -1
        for token in rest[: self.random.randint(0, ask.depth) if self.errs else ask.depth]:
            choices = [token if self.random.random() >= self.errs else (token + 1) % 100]
            if self.branching:
                choices += [(token + k) % 100 for k in self.random.sample(range(4), 2)]
                self.random.shuffle(choices)
            added = [draft.add(at, c) for c in dict.fromkeys(choices) if draft.size < ask.limit]
            if not added:
                break
            at = draft.child(at, token) or self.random.choice(added)
        return draft
