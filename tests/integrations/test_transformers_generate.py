"""After attach, ``generate`` gives what stock gives, whatever is asked of it."""

import pytest
import torch
from transformers_tiny import NAMES, ONE_EACH, VOCABULARY, assert_same, attached, cache_name, generate, prompt, stock


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 8, 21])
def test_greedy(name, length):
    """One token, a multiple of the window, and a prompt of several windows and stock chunks with a rest."""
    ids = prompt(2, length, seed=length)
    options = {"max_new_tokens": 19, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    wanted, got = (model.generate(ids, **options) for model in (stock(name), attached(name)))
    assert torch.equal(got.sequences, wanted.sequences)
    assert_same(torch.stack(got.logits), torch.stack(wanted.logits))


@pytest.mark.parametrize("name", NAMES)
def test_left_padded_batch_of_unaligned_prompts(name):
    ids, mask = prompt(3, 17), torch.ones(3, 17, dtype=torch.long)
    for row, length in enumerate((17, 3, 8)):
        ids[row, : 17 - length], mask[row, : 17 - length] = 0, 0
    wanted, got = (generate(model, ids, attention_mask=mask) for model in (stock(name), attached(name)))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_beam_search(name):
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    wanted, got = (generate(model, prompt(2, 9), 14, **options) for model in (stock(name), attached(name)))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_sampling_with_a_seed(name):
    results = []
    for model in (stock(name), attached(name)):
        torch.manual_seed(5)
        results.append(generate(model, prompt(2, 6), do_sample=True, num_return_sequences=2, top_k=0))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [5, 8])
def test_chunked_prompt(name, chunk):
    """21 = 4·5 + 1: the last chunk is a single token, which looks like a decode step."""
    if name == "mamba2":
        pytest.skip("stock: a cache without attention layers has no length, which chunking asks for")
    ids = prompt(2, 21)
    wanted, got = (generate(model, ids, prefill_chunk_size=chunk) for model in (stock(name), attached(name)))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_static_cache(name):
    ids, model = prompt(2, 11), stock(name)
    try:
        wanted = generate(model, ids, cache_implementation="static")
    except (ValueError, KeyError, TypeError, NotImplementedError, AttributeError) as error:
        pytest.skip(f"stock: {error}")
    got = generate(attached(name), ids, cache_implementation="static")
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "kimi_linear", "nemotron_h"])
def test_static_cache_in_a_compiled_decode(name):
    from transformers import CompileConfig

    compiled = CompileConfig(backend="eager", fullgraph=False)
    compiled._compile_all_devices = True
    ids = prompt(1, 11)
    wanted = generate(stock(name), ids, 12, cache_implementation="static")
    got = generate(attached(name), ids, 12, cache_implementation="static", compile_config=compiled)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_going_on_from_a_returned_cache(name):
    ids, more = prompt(2, 7), prompt(2, 12, seed=3)
    results = []
    for model in (stock(name), attached(name)):
        first = model.generate(ids, max_new_tokens=11, do_sample=False, return_dict_in_generate=True)
        # A cache without attention layers has no length to tell old tokens from new ones: stock takes new ones only.
        text = torch.cat([first.sequences[:, -1:] if name == "mamba2" else first.sequences, more], 1)
        cache = {cache_name(model): getattr(first, cache_name(model), None) or first.past_key_values}
        results.append(torch.cat([first.sequences[:, 7:], generate(model, text, 13, **cache)], 1))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """Tokens may differ where logits are close: the logits of one text must be as close as stock's own two paths."""
    ids = prompt(1, 30)
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, "prefill_chunk_size": None}
    reference = stock(name)(input_ids=ids, use_cache=False).logits[:, -1].detach()
    errors = []
    for model in (stock(name), attached(name)):
        model = model.to(dtype)
        short = model.generate(ids[:, :5], **options)
        cache = {cache_name(model): getattr(short, cache_name(model), None) or short.past_key_values}
        with torch.no_grad():
            for token in ids[:, 5:].T[:, :, None]:
                logits = model(input_ids=token, use_cache=True, **cache).logits
        errors.append((logits[:, -1].float() - reference).abs().max().item())
    assert errors[1] <= 1.5 * errors[0] + 1e-3, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [1, 2, 3, 16, 64])
def test_every_window(name, window):
    ids = prompt(2, 13)
    wanted = generate(stock(name), ids, 70)
    assert torch.equal(generate(attached(name, window=window, max_draft=1), ids, 70), wanted)
    assert wanted.max() < VOCABULARY
