"""Decode Mamba-2, Gated DeltaNet and Kimi Delta Attention layers from a checkpoint and a buffer of recent inputs."""

from replayssm.cache import CacheLayer, ReplayCache
from replayssm.checks import ReplayError
from replayssm.conv import conv_step
from replayssm.inputs import GdnInputs, KdaInputs, LinearInputs, Mamba2Inputs
from replayssm.layout import GDN, KDA, MAMBA2, Conv, Layout, Precision, Recurrence
from replayssm.ops import step
from replayssm.rows import Rows

__version__ = "0.1.0"

__all__ = [
    "GDN",
    "KDA",
    "MAMBA2",
    "CacheLayer",
    "Conv",
    "GdnInputs",
    "KdaInputs",
    "Layout",
    "LinearInputs",
    "Mamba2Inputs",
    "Precision",
    "Recurrence",
    "ReplayCache",
    "ReplayError",
    "Rows",
    "conv_step",
    "step",
]
