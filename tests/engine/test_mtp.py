"""The multi-token-prediction head: drafts are those of a naive computation, and never change a text."""

from pathlib import Path

import pytest
import torch
from engine_tiny import Oracle, boxed, engine, lengthy, prompts, solo, texts, tiny
from transformers import DynamicCache

from replayssm import ReplayError
from replayssm.engine import Draft, MtpDrafter, MtpHead, Params
from replayssm.engine import mtp as module
from support.interpreter import run_interpreted

NAMES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def head_of(model, seed: int = 0) -> MtpHead:
    torch.manual_seed(seed)
    head = MtpHead(model).eval()
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return head


def naive(model, head, tokens: list[int], depth: int) -> list[int]:
    """Greedy drafts from the whole text at once, then token by token."""
    ids, cache = torch.tensor([tokens]), DynamicCache()
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        size = hidden.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
        said = head(ids[:, 1:], hidden, torch.arange(size)[None], cache, mask)[:, -1:]
        found = [int(head.output(said).argmax())]
        while len(found) < depth:
            at = torch.tensor([[size + len(found) - 1]])
            said = head(torch.tensor([found[-1:]]), said, at, cache)
            found.append(int(head.output(said).argmax()))
    return found


class Recording(MtpDrafter):
    """Keeps what it proposed."""

    def propose(self, asks):
        drafts = super().propose(asks)
        self.kept = [
            *getattr(self, "kept", []),
            *((list(ask.tokens), ask.depth, d) for ask, d in zip(asks, drafts, strict=True)),
        ]
        return drafts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"slots": 1, "chunk": 3}, {"slots": 4, "max_draft": 4}])
def test_drafts_are_those_of_the_whole_text_and_the_text_is_solos(name, options):
    model, wanted = tiny(name)
    drafter = Recording(head_of(model), cost=0.01)
    with engine(model, drafter=drafter, **options) as served:
        assert texts(served.generate(prompts(), lengthy())) == wanted
        assert not drafter._texts
        assert sorted(drafter._free) == list(range(served.runner.slots))
    assert len(drafter.kept) > 10
    assert max(depth for _, depth, _ in drafter.kept) >= 3
    for tokens, depth, draft in drafter.kept:
        assert draft.tokens == naive(model, drafter.head, tokens, depth)
        assert draft.row_parents is None


def test_trees_grow_from_the_same_hidden_states():
    """Along every branch, the tokens below a node are the head's likeliest ones after that branch."""
    model, wanted = tiny()
    drafter = Recording(head_of(model), branches=(3, 2, 1), cost=0.01)
    with engine(model, drafter=drafter, max_draft=8) as served:
        assert texts(served.generate(prompts(), lengthy())) == wanted
    kept = [(tokens, draft) for tokens, _, draft in drafter.kept if draft.size > 6]
    assert kept
    for tokens, draft in kept[:4]:
        assert draft.parents.count(-1) == 3
        first = next(node for node, parent in enumerate(draft.parents) if parent == -1)
        below = next(node for node, parent in enumerate(draft.parents) if parent == first)
        assert draft.path(below) == naive(model, drafter.head, tokens, 2)
        # a branch that is not the likeliest one: teach the naive drafter its first token
        other = draft.tokens[1]
        assert draft.parents[1] == -1
        assert other != naive(model, drafter.head, tokens, 1)[0]
        mine = [draft.tokens[n] for n, parent in enumerate(draft.parents) if parent == 1]
        if mine:
            assert mine[0] == forced(model, drafter.head, tokens, other)


def forced(model, head, tokens: list[int], first: int) -> int:
    """The head's second drafted token where the first one is given."""
    ids, cache = torch.tensor([tokens]), DynamicCache()
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        size = hidden.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
        said = head(ids[:, 1:], hidden, torch.arange(size)[None], cache, mask)[:, -1:]
        said = head(torch.tensor([[first]]), said, torch.tensor([[size]]), cache)
        return int(head.output(said).argmax())


def test_boxed_model_and_long_prompts():
    model, tokenizer, found = boxed()
    ids = [tokenizer(text)["input_ids"][: 30 + 60 * i] for i, text in enumerate(found[:3])]
    drafter = Recording(head_of(model), cost=0.01)
    with engine(model, drafter=drafter, max_length=256, window=16, chunk=64) as served:
        assert texts(served.generate(ids, Params(max_tokens=6))) == [solo(model, each, 6) for each in ids]
    for tokens, depth, draft in drafter.kept:
        assert draft.tokens == naive(model, drafter.head, tokens, depth)


def test_hidden_states_do_not_pile_up_where_nobody_asks(monkeypatch):
    """A sequence that is not drafted for is read along, and its later drafts know all of it."""
    monkeypatch.setattr(module, "WAITING", 5)
    model, wanted = tiny()
    drafter, most = Recording(head_of(model), cost=0.01), []
    observe, asked = drafter.observe, drafter.propose

    def watch(seen):
        observe(seen)
        most.append(max(sum(map(len, text.waiting)) for text in drafter._texts.values()))

    drafter.observe = watch  # type: ignore[method-assign]
    drafter.propose = lambda asks: (  # type: ignore[method-assign]
        asked(asks) if len(asks[0].tokens) > 28 else [Draft() for _ in asks]
    )
    with engine(model, drafter=drafter) as served:
        assert served.generate(prompts()[3], Params(max_tokens=11))[0].tokens == wanted[3]
    assert max(most) <= 5
    assert drafter.kept
    for tokens, depth, draft in drafter.kept:
        assert draft.tokens == naive(model, drafter.head, tokens, depth)


def test_samples_of_a_prompt_share_what_the_head_knows():
    model, _ = tiny()
    params = Params(max_tokens=10, temperature=1.5, seed=3, n=3)
    with engine(model) as plain:
        expected = [sample.tokens for sample in plain.generate(prompts()[3], params)[0].samples]
    drafter = Recording(head_of(model), cost=0.01)
    starts = []
    with engine(model, drafter=drafter) as served:
        request = served.submit(prompts()[3], params)
        while not served.idle:
            served.step()
            starts += [text.start for text in drafter._texts.values()]
    assert [sample.tokens for sample in request.samples] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert set(starts) == {0}


def test_preempted_and_reused_sequences_go_on_without_their_beginning():
    model, wanted = tiny()
    drafter = Recording(head_of(model), cost=0.01)
    with engine(model, drafter=drafter, prefix_memory=10**7) as served:
        served.generate(prompts()[3], Params(max_tokens=2))
        request = served.submit(prompts()[3], Params(max_tokens=11))
        served.step()
        assert [text.start for text in drafter._texts.values()] == [16]
        while len(request.tokens) < 3:
            served.step()
        served.preempt(request)
        assert not drafter._texts
        while not served.idle:
            served.step()
        assert request.tokens == wanted[3]
        assert served.scheduler.reused == 16


def test_a_head_that_is_right_saves_forwards(monkeypatch):
    """What the head says decides: one that knows the text is accepted throughout."""
    model, wanted = tiny()
    known = {tuple(p): w for p, w in zip(prompts(), wanted, strict=True)}
    oracle = Oracle(known, errs=0.0)
    oracle.max_draft = 99
    drafter = MtpDrafter(head_of(model), cost=0.01)
    monkeypatch.setattr(drafter, "propose", lambda asks: [oracle._one(ask) for ask in asks])
    with engine(model, drafter=drafter) as served:
        assert texts(served.generate(prompts(), lengthy())) == wanted
        assert served.counters.accepted == served.counters.drafted > 15


def test_a_head_has_one_engine_and_one_model():
    model, _ = tiny()
    drafter = MtpDrafter(head_of(model))
    with engine(model, drafter=drafter):
        with pytest.raises(ReplayError, match="another engine has this head"):
            engine(tiny("qwen3_5_text")[0], drafter=drafter)
        assert drafter.bytes == 3 * 64 * 2 * 4 * sum(drafter.head.key_shape[1:]) * drafter.head.key_shape[0] // 2
    assert drafter.bytes == 0
    with pytest.raises(ReplayError, match="belongs to another model"):
        engine(tiny("qwen3_5_text")[0], drafter=drafter)
    engine(model, drafter=drafter).close()
    for options, match in (({"branches": ()}, "branches"), ({"cost": 0}, "cost")):
        with pytest.raises(ReplayError, match=match):
            MtpDrafter(drafter.head, **options)


@pytest.mark.parametrize("name", NAMES)
def test_published_names_load(tmp_path, name):
    """Written, read again, and read with experts one by one and beside other tensors, as checkpoints have them."""
    from safetensors.torch import load_file, save_file

    model, _ = tiny(name)
    head = head_of(model)
    head.save(tmp_path / "a.safetensors", torch.float32)
    tensors = load_file(tmp_path / "a.safetensors")
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"} < tensors.keys()
    assert {"mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.q_proj.weight"} < tensors.keys()
    single = {"lm_head.weight": torch.zeros(2), "model.norm.weight": torch.zeros(2)}
    for key, tensor in tensors.items():
        stem, _, kind = key.rpartition(".")
        if kind == "gate_up_proj":
            for number, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                single[f"{stem}.{number}.gate_proj.weight"] = gate.clone()
                single[f"{stem}.{number}.up_proj.weight"] = up.clone()
        elif kind == "down_proj" and stem.endswith("experts"):
            single |= {f"{stem}.{number}.down_proj.weight": each.clone() for number, each in enumerate(tensor)}
        else:
            single[key] = tensor
    assert (len(single) > len(tensors) + 2) == (name != "qwen3_5_text")
    (tmp_path / "b").mkdir()
    save_file(single, tmp_path / "b" / "model-00001-of-00001.safetensors")
    for folder in (tmp_path, tmp_path / "b"):
        again = MtpHead.load(model, folder)
        assert not again.training
        for key, tensor in head.state_dict().items():
            assert torch.equal(again.state_dict()[key], tensor)
    assert not {"embed", "lm_head"} & {key.partition(".")[0] for key in head.state_dict()}


def test_what_is_no_head_is_named(tmp_path):
    from safetensors.torch import save_file

    model, _ = tiny()
    with pytest.raises(ReplayError, match=r"has no multi-token-prediction head .* no safetensors file is there"):
        MtpHead.load(model, tmp_path)
    save_file({"model.a": torch.zeros(2), "lm_head.b": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ReplayError, match=r"tensors mtp\.\*\); its tensors begin with lm_head, model"):
        MtpHead.load(model, tmp_path)
    good = {f"mtp.{key}": tensor for key, tensor in head_of(model).state_dict().items()}
    for change, match in (
        ({"mtp.fc.weight": None}, r"lacks fc\.weight"),
        ({"mtp.embed_tokens.weight": torch.zeros(2)}, r"knows no embed_tokens\.weight"),
        ({"mtp.fc.weight": torch.zeros(2, 3)}, r"mtp\.fc\.weight: expected \[\d+, \d+\], got \[2, 3\]"),
    ):
        tensors = {key: tensor for key, tensor in (good | change).items() if tensor is not None}
        save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(ReplayError, match=match):
            MtpHead.load(model, tmp_path)
    lacking = {"mtp.layers.0.mlp.experts.1.up_proj.weight": torch.zeros(2, 2)}
    save_file(lacking, tmp_path / "x.safetensors")
    with pytest.raises(ReplayError, match=r"layers\.0\.mlp\.experts lacks 0\.gate_proj, 0\.up_proj, 0\.down_proj, 1"):
        MtpHead.load(model, tmp_path)
    for other in ("mamba2", "llama"):
        with pytest.raises(ReplayError, match="multi-token prediction needs a model with full-attention layers"):
            MtpHead(tiny(other)[0])


@pytest.mark.slow
@pytest.mark.parametrize("select", ["chain", "tree"])
def test_the_way_of_a_gpu_on_the_cpu(select):
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).with_name("interpreted_mtp.py"), select=select)
