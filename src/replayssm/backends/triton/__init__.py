"""Triton kernels for CUDA devices. In reading order: tile, gates, quant, step, fold, commit, conv, launch."""
