"""What a model moves, how long that takes and how much fits: arithmetic on shapes, without a tensor.

Read in this order: `shape` (a config becomes blocks), `families` (which attribute means what), `traffic` (bytes),
`gpus` (facts), `predict` (times, windows, capacities), `auto` (which precision), `window` (which window), `resolve`
(names and files become configs).
docs/planning.md has the formulas.
"""

from .auto import ERROR_CLASSES, Choice, choose_precision
from .gpus import Gpu, gpus
from .predict import Capacity, Prediction, Setting, best_window, capacity, predict
from .report import report
from .resolve import resolve, shipped
from .shape import Block, ModelShape
from .traffic import Cycle, Traffic, conventional_step, replay_step
from .window import choose_window

__all__ = [
    "ERROR_CLASSES",
    "Block",
    "Capacity",
    "Choice",
    "Cycle",
    "Gpu",
    "ModelShape",
    "Prediction",
    "Setting",
    "Traffic",
    "best_window",
    "capacity",
    "choose_precision",
    "choose_window",
    "conventional_step",
    "gpus",
    "predict",
    "replay_step",
    "report",
    "resolve",
    "shipped",
]
