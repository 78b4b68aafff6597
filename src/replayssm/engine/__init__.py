"""Many texts at once from a model of transformers: continuous batching and speculation that costs nothing to reject.

See docs/speculation.md. Reading order: request, tree, sampling, attention, packed, runner, scheduler, loop, engine.
"""

from .draft_model import DraftModel
from .drafters import Ask, Drafter, Observer, PromptLookup, Seen, SuffixLookup
from .engine import Engine
from .loop import Counters
from .mtp import MtpDrafter
from .mtp_head import MtpHead
from .request import Event, Logprob, Params, Request, Sample
from .sampling import Point
from .tree import Draft

__all__ = [
    "Ask",
    "Counters",
    "Draft",
    "DraftModel",
    "Drafter",
    "Engine",
    "Event",
    "Logprob",
    "MtpDrafter",
    "MtpHead",
    "Observer",
    "Params",
    "Point",
    "PromptLookup",
    "Request",
    "Sample",
    "Seen",
    "SuffixLookup",
]
