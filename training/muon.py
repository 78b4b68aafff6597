"""Muon for the matrices of a model, AdamW for everything else, as one optimiser object."""

from collections import defaultdict

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic iteration that brings singular values near 1


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return `[N, R, C]` matrices with their singular values brought near 1 (Newton-Schulz iteration)."""
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Optimiser:
    """Update matrices by Muon and embeddings, the output layer, vectors and convolutions by AdamW.

    Matrices of one shape are updated together, so that the iteration costs a few batched products.
    """

    def __init__(self, model: nn.Module, rate: float, adam_rate: float, decay: float, momentum: float = 0.95):
        self.rate, self.adam_rate, self.decay, self.momentum = rate, adam_rate, decay, momentum
        output = getattr(model, "get_output_embeddings", lambda: None)()
        embedding = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) or m is output}
        linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and min(m.weight.shape) >= 16}
        self.groups: dict[tuple, list[Tensor]] = defaultdict(list)
        plain, decayed = [], []
        for parameter in model.parameters():
            if id(parameter) in linear - embedding:
                self.groups[tuple(parameter.shape)].append(parameter)
            elif id(parameter) in embedding:
                decayed.append(parameter)
            else:
                plain.append(parameter)
        self.buffers = {shape: torch.zeros(len(ps), *shape, device=ps[0].device) for shape, ps in self.groups.items()}
        fused = next(model.parameters()).is_cuda
        groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=adam_rate, betas=(0.9, 0.98), eps=1e-10, fused=fused)
        self.orthogonalise = torch.compile(orthogonalise) if fused else orthogonalise

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply one update with both learning rates multiplied by `scale`."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        rate = self.rate * scale
        for shape, parameters in self.groups.items():
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            buffer = self.buffers[shape]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = self.orthogonalise(gradient.lerp_(buffer, self.momentum))  # Nesterov
            # The usual factor that gives the update the size of an AdamW update
            update = update * (0.2 * max(shape) ** 0.5 * rate)
            for parameter, change in zip(parameters, update.unbind(0), strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.adam.zero_grad(set_to_none=True)
        for parameters in self.groups.values():
            for parameter in parameters:
                parameter.grad = None

    def state_dict(self) -> dict:
        """Return what a resumed run needs."""
        return {"adam": self.adam.state_dict(), "buffers": {str(s): b for s, b in self.buffers.items()}}

    def load_state_dict(self, state: dict) -> None:
        """Take up the state of an earlier run."""
        self.adam.load_state_dict(state["adam"])
        for shape, buffer in self.buffers.items():
            buffer.copy_(state["buffers"][str(shape)])
