import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import ReplayError
from replayssm.layout import GDN, KDA, MAMBA2, Layout, Precision
from replayssm.plan import (
    Cycle,
    Setting,
    Traffic,
    best_window,
    capacity,
    choose_precision,
    choose_window,
    conventional_step,
    gpus,
    predict,
    replay_step,
    report,
    resolve,
    shipped,
)
from replayssm.plan.traffic import entry_bytes, inputs_bytes, replay_read, state_bytes

H200 = gpus()["h200"]
SUPER = Layout(MAMBA2, heads=128, groups=8, head_dim=64, state_dim=128)  # Nemotron-3 Super
QWEN = Layout(GDN, heads=64, groups=16, head_dim=128, state_dim=128)  # Qwen3.5-122B
MIB = 1024 * 1024


# --- traffic --------------------------------------------------------------------------------------------------------


def test_buffer_entries_by_hand():
    key, value, derived = 16 * 128 * 2, 64 * 128 * 2, 64 * 128 * 4
    wanted = {"key": key, "value": value, "weight": 256, "decay": 256, "key_scale": 64, "written": derived}
    assert entry_bytes(QWEN) == wanted
    assert sum(entry_bytes(replace(QWEN, recurrence=KDA)).values()) == sum(wanted.values()) + 64 * 128 * 4 - 256
    assert entry_bytes(SUPER) == {"key": 8 * 128 * 2, "value": 128 * 64 * 2, "weight": 512, "decay": 512}


def test_conventional_step_by_hand():
    inputs = Traffic((2 * 16 * 128 + 64 * 128 + 64 + 64) * 2, 64 * 128 * 2)
    assert inputs_bytes(QWEN) == inputs
    assert conventional_step(QWEN) == Traffic(4 * MIB + inputs.read, 4 * MIB + inputs.write)
    verify = conventional_step(replace(QWEN, max_draft=4))
    assert verify == Traffic(4 * MIB + 4 * inputs.read, 16 * MIB + 4 * inputs.write)


def test_replay_step_by_hand():
    step = replay_step(SUPER)
    entry = 8 * 128 * 2 + 128 * 64 * 2 + 512 + 512
    inputs = inputs_bytes(SUPER)
    assert step.read == 4 * MIB + 7.5 * entry + inputs.read + (4 * MIB + 16 * entry) / 16
    assert step.write == entry + inputs.write + 4 * MIB / 16
    copied = replay_step(replace(SUPER, precision=Precision("fp32", "bf16")))
    assert copied.read == step.read - 2 * MIB
    assert copied.write == step.write + 2 * MIB / 16


@pytest.mark.parametrize(
    ("window", "draft", "acceptance", "cycle"),
    [
        (16, 1, 0.3, Cycle(1.0, 16.0, 7.5, 16.0)),
        (1, 1, 1.0, Cycle(1.0, 1.0, 0.0, 1.0)),
        (16, 4, 1.0, Cycle(4.0, 4.0, 6.0, 16.0)),
        (16, 4, 0.0, Cycle(1.0, 13.0, 6.0, 13.0)),
        (8, 8, 0.5, Cycle(2 - 2**-7, 1.0, 0.0, 2 - 2**-7)),
    ],
)
def test_cycles_by_hand(window, draft, acceptance, cycle):
    assert Cycle.of(window, draft, acceptance) == cycle


@given(st.integers(1, 64), st.integers(1, 16), st.floats(0, 1))
def test_a_cycle_folds_what_its_steps_commit(window, draft, acceptance):
    cycle = Cycle.of(max(window, draft), draft, acceptance)
    assert cycle.folded == pytest.approx(cycle.steps * cycle.tokens, rel=1e-9)  # Wald's identity
    assert 0 <= cycle.length <= max(window, draft) - draft


@given(st.sampled_from([MAMBA2, GDN, KDA]), st.integers(1, 8), st.sampled_from([32, 64, 128, 256]), st.integers(1, 8))
def test_traffic_grows_with_the_state_and_never_beats_one_read(recurrence, heads, width, draft):
    layout = Layout(recurrence, heads, heads, width, width, window=16, max_draft=draft)
    larger = replace(layout, heads=2 * heads, groups=2 * heads)
    for step in (conventional_step, replay_step):
        assert step(larger).total == pytest.approx(2 * step(layout).total)
        assert step(layout).total > state_bytes(layout)


# --- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "measured_ms"), [(SUPER, 0.560), (QWEN, 0.5345)])
def test_conventional_step_on_the_h200_is_within_a_tenth_of_the_measured_one(layout, measured_ms):
    predicted = H200.step + H200.seconds(conventional_step(layout) * 256)
    assert predicted * 1e3 == pytest.approx(measured_ms, rel=0.10)


@pytest.mark.parametrize(
    ("layout", "batch", "measured_ms"),
    [(SUPER, 64, 0.0905), (SUPER, 256, 0.326), (SUPER, 512, 0.643), (QWEN, 64, 0.0865), (QWEN, 256, 0.315)],
)
def test_replay_cycle_on_the_h200_is_within_a_tenth_of_the_best_published_kernels(layout, batch, measured_ms):
    predicted = H200.replay + H200.seconds(replay_step(layout) * batch)
    assert predicted * 1e3 == pytest.approx(measured_ms, rel=0.10)


@pytest.mark.parametrize(
    ("batch", "measured_ms"), [(1, 5.02), (64, 7.49), (256, 14.7), (512, 25.5)]
)  # Qwen3.5-4B, vLLM 0.27.1, context under 300
def test_whole_steps_on_the_h200_are_within_a_sixth_of_a_measured_engine(batch, measured_ms):
    one = predict(resolve("qwen3.5-4b"), H200, batch, Setting(context=300))
    assert one.step_conventional * 1e3 == pytest.approx(measured_ms, rel=1 / 6)


def test_seconds_count_what_is_rewritten_at_copy_speed():
    assert H200.seconds(Traffic(4.32e12, 0)) == pytest.approx(1)
    assert H200.seconds(Traffic(2.1e12, 2.1e12)) == pytest.approx(1)
    assert H200.seconds(Traffic(1e12, 2e12)) == pytest.approx(3 / 4.2)


def test_gpus_without_a_measurement_scale_the_datasheet_and_say_so():
    datasheet = {"h100": 3.35e12, "b200": 8e12, "b300": 8e12, "mi300x": 5.3e12}
    for key, bandwidth in datasheet.items():
        assert gpus()[key].read == pytest.approx(bandwidth * 4.32 / 4.8, rel=1e-3)
        assert gpus()[key].copy == pytest.approx(bandwidth * 4.20 / 4.8, rel=1e-3)
        assert gpus()[key].measured.startswith("nothing")


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(shipped()), st.integers(1, 512), st.integers(1, 8), st.floats(0, 1), st.integers(0, 100_000))
def test_predictions_grow_with_batch_context_and_drafts(name, batch, draft, acceptance, context):
    shape = resolve(name)
    setting = Setting(max_draft=draft, acceptance=acceptance, context=context)
    one, twice = (predict(shape, H200, size, setting) for size in (batch, 2 * batch))
    assert one.step_conventional < twice.step_conventional < 2 * one.step_conventional
    assert one.recurrent_replay < twice.recurrent_replay
    assert one.recurrent_speedup <= twice.recurrent_speedup
    longer = predict(shape, H200, batch, replace(setting, context=context + 4096))
    assert longer.rest >= one.rest
    assert 1 <= one.tokens <= draft
    more = predict(shape, H200, batch, replace(setting, max_draft=draft + 1))
    assert more.recurrent_conventional > one.recurrent_conventional
    assert more.recurrent_speedup >= one.recurrent_speedup


def test_experts_read_grow_from_those_of_a_token_to_all():
    moe = next(block for block in resolve("qwen3.5-35b-a3b").blocks if block.kind == "moe")
    assert moe.params_read(1) == pytest.approx(moe.params_active)
    assert moe.params_read(2) < 2 * moe.params_active
    assert moe.params_read(10_000) == pytest.approx(moe.params_stored)


def test_the_window_that_was_fastest_has_room_for_two_steps():
    for name, few, many in (("mamba2", 32, 48), ("gdn", 32, 32), ("kda", 16, 32)):
        recurrence = {"mamba2": MAMBA2, "gdn": GDN, "kda": KDA}[name]
        assert [choose_window(recurrence, draft) for draft in (1, 16)] == [few, many]
        assert all(choose_window(recurrence, draft) >= 2 * draft for draft in range(1, 17))
        assert choose_window(recurrence, 4, "cpu") == 16 + 3


def test_best_window_is_the_square_root_of_fold_over_read():
    # Per token: 2·state/W for the fold and (W-1)/2 entries for the reads, so W is near sqrt(4·state / entry).
    shape = resolve("nemotron-3-super-120b-a12b")
    window, cost = best_window(shape, Setting())
    entry = 8 * 128 * 2 + 128 * 64 * 2 + 512 + 512
    assert window == round((4 * 4 * MIB / entry) ** 0.5)
    assert all(cost < 1.000001 * 40 * replay_step(replace(SUPER, window=w)).total for w in range(4, 65))
    assert best_window(shape, Setting(precision=Precision("bf16")))[0] < window
    with pytest.raises(ReplayError, match="do not fit"):
        best_window(shape, Setting(window=100, max_draft=100))


def test_capacity_by_hand():
    shape = resolve("mamba-codestral-7b")  # no attention: sequences are state, buffer and convolution tail
    one = capacity(shape, Setting(max_draft=4), 80e9)
    channels = 128 * 64 + 2 * 8 * 128
    state = 4 * MIB + channels * 3 * 2
    entry = 8 * 128 * 2 + 128 * 64 * 2 + 512 + 512
    assert one.conventional == 64 * state
    assert one.snapshots == 4 * one.conventional
    assert one.replay == 64 * (4 * MIB + 16 * entry + channels * (3 + 4) * 2)
    assert one.sequences(one.snapshots) == int(80e9 / (256 * state))


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(shipped()), st.integers(2, 16), st.integers(0, 1_000_000))
def test_drafts_cost_memory_conventionally_only(name, draft, context):
    shape = resolve(name)
    plain, drafts = (capacity(shape, Setting(max_draft=t, context=context), 1e12) for t in (1, draft))
    assert plain.snapshots == plain.conventional == drafts.conventional < drafts.snapshots
    assert drafts.replay < 1.1 * plain.replay
    assert drafts.sequences(drafts.replay) >= drafts.sequences(drafts.snapshots)


def test_settings_are_checked():
    with pytest.raises(ReplayError, match="acceptance"):
        Setting(acceptance=1.5)
    with pytest.raises(ReplayError, match="weight_bits"):
        Setting(weight_bits=0)
    with pytest.raises(ReplayError, match="batch"):
        predict(resolve("qwen3.5-4b"), H200, 0, Setting())
    with pytest.raises(ReplayError, match="max_draft"):
        predict(resolve("qwen3.5-4b"), H200, 1, Setting(window=4, max_draft=5))


@pytest.mark.parametrize("name", shipped())
@pytest.mark.parametrize("gpu", gpus())
def test_every_shipped_model_is_explained_on_every_gpu(name, gpu):
    document = report(resolve(name), gpus()[gpu], Setting(), (1, 256))
    assert document["model"]["source"]
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text) == document


def test_precision_is_the_fastest_of_the_error_class():
    for layout in (SUPER, QWEN):
        one = choose_precision([replace(layout, heads=layout.groups)], H200, 1, "coarse")  # a launch takes longer
        assert (one.precision, one.error) == (Precision(), "exact")
        many = {error: choose_precision([layout], H200, 256, error) for error in ("exact", "fine", "close", "coarse")}
        assert [choice.precision.name for choice in many.values()] == ["fp32", "fp32+bf16", "fp32+fp8", "fp32+nvfp4"]
        times = list(many["coarse"].seconds.values())
        assert times == sorted(times, reverse=True)
        step = H200.replay + H200.seconds(replay_step(replace(layout, precision=Precision.preset("float32+fp8"))) * 256)
        assert many["coarse"].seconds["close"] == pytest.approx(step)


def test_scales_are_traffic():
    layout = replace(QWEN, precision=Precision("int8", "nvfp4"))
    rows, elements = 64 * 128, 64 * 128 * 128
    assert state_bytes(layout) == elements + 4 * rows
    assert replay_read(layout, 0).read == elements // 2 + elements // 16 + 64 * 4
    split, plain = (replay_read(replace(QWEN, precision=Precision(buffer=b)), 8) for b in ("bf16x2", "fp32"))
    assert split.read == plain.read
