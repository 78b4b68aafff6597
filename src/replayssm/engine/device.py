"""The step rows of a forward on a GPU: tables at fixed addresses, and forwards and commits captured in CUDA graphs.

A `Block` is the tables of one size: R rows of at most T tokens. The host writes them into pinned memory and sends them
with one copy; everything after that reads them on the device, so that a captured forward serves every batch that fits.
Rows and tokens that a batch does not fill are padding: slot −1, which every kernel leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm import CacheLayer, ReplayCache, ReplayError, Rows, conv_step, step
from replayssm.integrations.transformers.scan import Scan

from .attention import KeyValues, lines_of, refuse
from .packed import Row, View

# Fields of a table begin at multiples of so many numbers: kernels are compiled for aligned pointers.
_ALIGNED = 32


class Table:
    """Integer vectors that the host writes and the device reads: one copy moves all of them.

    Attributes:
        on: name -> int32 tensor on the device, at a fixed address.
    """

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        """``sizes``: numbers of each vector."""
        starts, at = {}, 0
        for name, size in sizes.items():
            starts[name], at = at, at + -(-size // _ALIGNED) * _ALIGNED
        self._host = torch.zeros(at, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(at, dtype=torch.int32, device=device)
        self._at = {name: self._host[start : start + sizes[name]] for name, start in starts.items()}
        self.on = {name: self._device[start : start + sizes[name]] for name, start in starts.items()}
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, **vectors: tuple[Sequence[int], int]) -> None:
        """Write vectors, each with what fills it up, and copy all to the device without waiting for it."""
        if self._sent is not None:
            self._sent.synchronize()  # of the copy before, long done
        for name, (values, rest) in vectors.items():
            line = self._at[name]
            line[: len(values)] = torch.tensor(values, dtype=torch.int32)
            line[len(values) :] = rest
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


@dataclass
class Captured:
    """A piece of work: runs as it is the first time, which compiles its kernels; then captured and replayed."""

    work: Callable[[], Any]
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    result: Any = None

    def run(self, pool: Any) -> Any:
        """Do the work; ``pool``: memory of graphs, None: never capture. What it returned first, at its addresses."""
        self.runs += 1
        if pool is None or self.runs == 1:
            self.result = self.work()
            return self.result
        if self.graph is None:
            self.result = None
            self.graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self.graph, pool=pool):
                    self.result = self.work()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ReplayError(
                    f"graphs: this model cannot be captured in a CUDA graph ({str(error).splitlines()[0]}); pass "
                    "graphs=False"
                ) from error
        self.graph.replay()
        return self.result


class Block:
    """The tables of forwards of R rows, at most T tokens each.

    Attributes:
        rows: R.
        draft: T.
        table: slots, offsets and parents as the recurrent layers' verbs take them; N = R·T tokens.
        tokens: what the host sends before a forward: slots, offsets, lengths [R]; ids, homes, places, positions, lines,
            parents [N] (see ``backends.triton.attention.Table``).
        taken: what it sends before a commit: accepted [R], path [R·T].
        forward: logits [N, vocabulary], best [N] and hidden states.
        commit: of every pool.
    """

    def __init__(self, rows: int, draft: int, tree: bool, device: torch.device) -> None:
        self.rows, self.draft, self.tree = rows, draft, tree
        by_token = ("ids", "homes", "places", "positions", "lines", "parents")
        sizes = {"slots": rows, "offsets": rows + 1, "lengths": rows, **dict.fromkeys(by_token, rows * draft)}
        self.tokens = Table(sizes, device)
        self.taken = Table({"accepted": rows, "path": rows * draft}, device)
        on = self.tokens.on
        self.table = Rows(on["slots"], on["offsets"], on["parents"] if tree else None)
        self.forward: Captured
        self.commit: Captured

    def fill(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Send a batch: its rows, and how many tokens each slot holds already."""
        slots = [row.slot for row in rows]
        if self.draft == 1:
            alone = len(rows)
            self.tokens.send(
                slots=(slots, -1),
                offsets=(range(alone + 1), alone),
                lengths=(lengths, 0),
                ids=([row.tokens[0] for row in rows], 0),
                homes=(slots, -1),
                places=(lengths, 0),
                positions=(lengths, 0),
                lines=([1] * alone, 0),
                parents=([-1] * alone, -1),
            )
            return
        offsets, homes, places, positions, lines, parents, ids = [0], [], [], [], [], [], []
        for row, length in zip(rows, lengths, strict=True):
            above = row.parents if row.parents is not None else range(-1, row.count - 1)
            depth: list[int] = []
            for parent in above:
                depth.append(0 if parent < 0 else depth[parent] + 1)
            offsets.append(offsets[-1] + row.count)
            ids += row.tokens
            homes += [row.slot] * row.count
            places += range(length, length + row.count)
            positions += [length + d for d in depth]
            lines += lines_of(above)
            parents += above
        self.tokens.send(
            slots=(slots, -1),
            offsets=(offsets, offsets[-1]),
            lengths=(lengths, 0),
            ids=(ids, 0),
            homes=(homes, -1),
            places=(places, 0),
            positions=(positions, 0),
            lines=(lines, 0),
            parents=(parents, -1),
        )

    def accept(self, taken: Sequence[int], lines: Sequence[Sequence[int]]) -> None:
        """Send what a commit takes: how many tokens of each row, and which."""
        path = [token for line in lines for token in [*line, *[-1] * (self.draft - len(line))]]
        self.taken.send(accepted=(taken, 0), path=(path, -1))


@dataclass
class DeviceView(View):
    """The cache argument of a forward of a block: nothing here looks at a value.

    Attributes:
        block: whose tables it reads.
        recurrent: the pool's layer for each mixer's ``layer_idx``.
        keys: keys and values of the attention layers.
    """

    block: Block
    recurrent: dict[int, CacheLayer]
    keys: KeyValues
    _updated: int = field(default=-1, init=False)

    def scan(self, layer: int, call: Scan) -> Tensor:
        """See ``View.scan``."""
        return call.finish(step(self.recurrent[layer], call.inputs(), self.block.table)[None])

    def convolve(self, layer: int, stock: Any, x: Tensor, weight: Tensor, bias: Any, act: str | None) -> Tensor:
        """See ``View.convolve``."""
        out = conv_step(self.recurrent[layer], x[0].transpose(0, 1), weight, bias, self.block.table, act)
        return out.transpose(0, 1)[None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values into their slots."""
        from replayssm.backends.triton import attention

        self._updated = layer_idx
        stored_keys, stored_values = self.keys.layers[layer_idx]
        attention.write(stored_keys, stored_values, keys, values, table_of(self.block))
        return keys, values

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Each row's attention over its own slot."""
        from replayssm.backends.triton import attention

        refuse(options)
        scaling = float(query.shape[3] ** -0.5) if scaling is None else scaling
        keys, values = self.keys.layers[self._updated]
        table = table_of(self.block)
        return attention.attend(query, keys, values, table, self.block.draft, scaling, sliding_window)[None]


class Stepper:
    """Runs step rows on the device.

    Attributes:
        blocks: by rows, tokens a row, and whether drafts branch.
        hidden: hidden states [N, hidden_size] of the last forward, where the model's caller wants them.
    """

    def __init__(
        self,
        forward: Callable[[View, Tensor, Tensor], tuple[Tensor, Tensor | None]],
        pools: Sequence[ReplayCache],
        recurrent: dict[int, CacheLayer],
        keys: KeyValues,
        slots: int,
        max_draft: int,
        graphs: bool,
    ) -> None:
        """``forward``: the model, from a view, token ids and positions [1, N] to logits and hidden states [N, …]."""
        self._forward, self._pools, self._recurrent, self._keys = forward, pools, recurrent, keys
        self._slots, self._max_draft, self._device = slots, max_draft, keys.device
        # One pool for all graphs: they never run at the same time.
        graphs = graphs and self._device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if graphs else None
        self.blocks: dict[tuple[int, int, bool], Block] = {}
        self.hidden: Tensor | None = None
        self._last: Block

    def block(self, rows: int, draft: int, tree: bool = False) -> Block:
        """The block that holds so many rows of so many tokens: the next powers of two."""
        size = min(_power(rows), self._slots), min(_power(draft), self._max_draft), tree
        if size not in self.blocks:
            self.blocks[size] = block = Block(*size, self._device)
            view = DeviceView(block, self._recurrent, self._keys)
            block.forward = Captured(lambda: self._logits(view))
            block.commit = Captured(lambda: self._keep(block))
        return self.blocks[size]

    def forward(self, rows: Sequence[Row], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [N, vocabulary] of the rows' tokens in order, and the best token of each [N]; then padding.

        They are overwritten by the next forward.
        """
        tree = any(row.parents is not None for row in rows)
        self._last = self.block(len(rows), max(row.count for row in rows), tree)
        self._last.fill(rows, lengths)
        return self.run(self._last)

    def commit(self, taken: Sequence[int], lines: Sequence[Sequence[int]]) -> None:
        """Keep so many tokens of each row of the last forward, those along ``lines``."""
        self._last.accept(taken, lines)
        self.keep(self._last)

    def run(self, block: Block) -> tuple[Tensor, Tensor]:
        """The forward of a block with what its table holds."""
        logits, best, self.hidden = block.forward.run(self._memory)
        return logits, best

    def keep(self, block: Block) -> None:
        """The commit of a block with what its table holds."""
        block.commit.run(self._memory)

    def _logits(self, view: DeviceView) -> tuple[Tensor, Tensor, Tensor | None]:
        on = view.block.tokens.on
        logits, hidden = self._forward(view, on["ids"].long()[None], on["positions"].long()[None])
        return logits, best_of(logits), hidden

    def _keep(self, block: Block) -> None:
        taken = block.taken.on
        path = taken["path"].view(block.rows, block.draft) if block.tree else None
        for pool in self._pools:
            pool.commit(block.table, taken["accepted"], path)
        if path is not None:
            from replayssm.backends.triton import attention

            for keys, values in self._keys.layers.values():
                attention.keep(keys, values, table_of(block), path, taken["accepted"])


def table_of(block: Block) -> Any:
    """A block's table as the attention kernels take it."""
    from replayssm.backends.triton import attention

    return attention.Table(*(block.tokens.on[name] for name in attention.Table._fields))


def best_of(logits: Tensor) -> Tensor:
    """The likeliest token at each of N logits, int64 [N]; −1 where they are no numbers or too large."""
    most, index = logits.max(-1)
    return torch.where(most.isfinite(), index, -1)


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
