"""The multi-token-prediction head of Qwen3.5-like models: which token comes after the next one.

For position t it takes what the model's output layer reads there and the token at t + 1, and predicts the token at
t + 2 with the model's own output layer (DeepSeek-V3, section 2.2; tensor names and order as in published Qwen3-Next and
Qwen3.5 checkpoints):

    x_t = fc [ norm_e(embedding(token_{t+1})) ; norm_h(hidden_t) ]
    hidden'_t = norm(layer(x_1 … x_t)),   logits of token t + 2 = output(hidden'_t)

Deeper drafts put hidden'_t and the drafted token in the place of hidden_{t+1} and the token at t + 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from replayssm import ReplayError

from .binding import cache_name

PREFIX = "mtp."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class MtpHead(nn.Module):
    """One decoder layer on top of a model, whose embedding, rotary positions and output layer it shares.

    Attributes:
        config: of the model's text part.
        index: ``layer_idx`` of the head's layer: that of a full-attention layer, of which it is a copy in kind.
    """

    def __init__(self, model: nn.Module) -> None:
        """Build the head of ``model`` with fresh weights, in its dtype and on its device.

        Raises:
            ReplayError: the model is not of a kind that has such a head.
        """
        super().__init__()
        # A tuple: the model's weights are no weights of the head.
        self._model = (model,)
        base = _text_model(model)
        self.config: Any = base.config
        kinds = getattr(self.config, "layer_types", None) or []
        if "full_attention" not in kinds or not hasattr(base, "rotary_emb"):
            raise ReplayError(
                f"{type(model).__name__}: multi-token prediction needs a model with full-attention layers such as "
                f"qwen3_5 or qwen3_next; this one has {', '.join(dict.fromkeys(kinds)) or 'no layer_types'}"
            )
        self.index = kinds.index("full_attention")
        layer, norm, size = base.layers[self.index], type(base.norm), self.config.hidden_size
        weight = next(model.parameters())
        with torch.device(weight.device):
            self.pre_fc_norm_embedding = norm(size, eps=self.config.rms_norm_eps)
            self.pre_fc_norm_hidden = norm(size, eps=self.config.rms_norm_eps)
            self.fc = nn.Linear(2 * size, size, bias=False)
            self.layers = nn.ModuleList([type(layer)(self.config, self.index)])
            self.norm = norm(size, eps=self.config.rms_norm_eps)
        self.apply(base._init_weights)
        self.to(weight.dtype)
        self._cache_name = cache_name(self.layers[0])

    @classmethod
    def load(cls, model: nn.Module, folder: str | Path | None = None) -> MtpHead:
        """The head that lies beside a model's weights: tensors ``mtp.*`` in any safetensors file of the folder.

        Args:
            model: of transformers.
            folder: None: where the model was loaded from.

        Raises:
            ReplayError: there are no such tensors, some are missing, or there are others.
        """
        place = Path(folder if folder is not None else getattr(model, "name_or_path", "") or "")
        tensors, others = _read(place)
        if not tensors:
            found = f"its tensors begin with {', '.join(sorted(others))}" if others else "no safetensors file is there"
            raise ReplayError(f"{place}: has no multi-token-prediction head (tensors {PREFIX}*); {found}")
        head = cls(model)
        head.take(_with_experts_fused(tensors))
        return head.eval()

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by their names without the prefix.

        Raises:
            ReplayError: a name or a shape differs.
        """
        wanted = self.state_dict()
        for what, names in (("lacks", wanted.keys() - tensors.keys()), ("knows no", tensors.keys() - wanted.keys())):
            if names:
                raise ReplayError(f"multi-token-prediction head: {what} {', '.join(sorted(names))}")
        for name, tensor in tensors.items():
            if tensor.shape != wanted[name].shape:
                raise ReplayError(f"{PREFIX}{name}: expected {list(wanted[name].shape)}, got {list(tensor.shape)}")
        self.load_state_dict(tensors)

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the weights under their published names."""
        from safetensors.torch import save_file

        tensors = {PREFIX + name: t.detach().to("cpu", dtype).contiguous() for name, t in self.state_dict().items()}
        save_file(tensors, path, {"format": "pt"})

    @property
    def model(self) -> nn.Module:
        """The model below."""
        return self._model[0]

    @property
    def key_shape(self) -> tuple[int, int, int]:
        """Key heads, width of a key and width of a value."""
        attention: Any = self.layers[0].self_attn
        dim = attention.head_dim
        return attention.k_proj.out_features // dim, dim, dim

    def output(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., hidden_size]."""
        head: Callable[[Tensor], Tensor] = self.model.get_output_embeddings()  # type: ignore[operator]
        return head(hidden)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: Any, mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states, from which ``output`` predicts the token after ``tokens``.

        Args:
            tokens: [B, N] token ids.
            hidden: [B, N, hidden_size] before each token: the model's last hidden state, after its last norm, or what
                this function returned for a token that was drafted.
            positions: [1 or B, N], of the hidden states.
            cache: a cache as the model's layers take it, under ``index``.
            mask: as the model's layers take it.

        Returns:
            [B, N, hidden_size].
        """
        base = _text_model(self.model)
        embedded = self.pre_fc_norm_embedding(base.embed_tokens(tokens))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], -1))
        # Models that also take pictures have three positions a token; in text all three are the same.
        places = positions.expand(3, -1, -1) if hasattr(base.rotary_emb, "mrope_section") else positions
        rotary = base.rotary_emb(x, places)
        x = self.layers[0](x, position_embeddings=rotary, attention_mask=mask, **{self._cache_name: cache})
        return self.norm(x)


def _text_model(model: nn.Module) -> Any:
    """The part of a model that has embedding, layers and norm."""
    base: Any = model.base_model
    return getattr(base, "language_model", base)


def _read(folder: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Tensors ``mtp.*`` of a folder by the rest of their names, and how the names of the others begin."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    others: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(PREFIX):
                    tensors[name.removeprefix(PREFIX)] = file.get_tensor(name)
                else:
                    others.add(name.partition(".")[0])
    return tensors, others


def _with_experts_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of single experts as transformers has them: [experts, gate and up, in] and [experts, out, in]."""
    fused: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            fused[name] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for name, parts in experts.items():
        numbers = range(1 + max(number for number, _ in parts))
        lacking = [f"{n}.{kind}_proj" for n in numbers for kind in ("gate", "up", "down") if (n, kind) not in parts]
        if lacking:
            raise ReplayError(f"multi-token-prediction head: {name} lacks {', '.join(lacking)}")
        fused[f"{name}.gate_up_proj"] = torch.stack([torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in numbers])
        fused[f"{name}.down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    return fused
