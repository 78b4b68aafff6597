"""Rows as a run on a GPU writes them."""

import pytest

from replayssm.bench.cases import make_case


def make_row(shape, batch, draft=1, precision="fp32", **more):
    case = make_case(shape, batch, draft, 32, precision)
    return {
        **vars(case),
        "ms": 0.3,
        "ms_step": 0.28,
        "ms_conventional": 0.54,
        "ratio": 1.8,
        "read_share": 0.8,
        "read_tb_s": 4.5,
        "bytes": 10**9,
        "slowest_over_mean": 1.02,
        "fold_over_copy": 1.25,
        "error": 1e-7,
        "error_conventional": 2e-7,
        "by_step": [0.3, 0.31],
        "aligned": [0.28, 0.32],
        "gpu": "GPU 9",
        "date": "2026-01-02",
        "torch": "2.0",
        "triton": "3.0",
        "commit": "abc",
    } | more


@pytest.fixture
def rows():
    return [
        make_row("gdn-2x16x16g1", 64),
        make_row("gdn-2x16x16g1", 64, 4),
        make_row("gdn-2x16x16g1", 256),
        make_row("gdn-2x16x16g1", 64, precision="fp32+fp8"),
        make_row("mamba2-4x8x16g2", 64),
    ]
