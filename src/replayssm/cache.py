"""The cache: checkpoints and buffers of many sequences, and the verbs that change them.

The buffer is linear. ``length`` counts a slot's committed entries, one number for all layers; a step writes drafts from
``length`` on; ``commit`` moves ``length`` forward by what was accepted, and folds the rows that would have no room for
the next draft. Rejecting is not moving forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm import backends, checks, compiled, precision, transfer
from replayssm.checks import ReplayError
from replayssm.host import Host
from replayssm.layout import Conv, Layout
from replayssm.rows import Rows

Integers = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False)
class CacheLayer:
    """One layer of a cache, as ``step`` takes it: ``cache[i]``."""

    cache: ReplayCache
    index: int

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The layer's tensors by name (``Layout.tensors``), each [slots, …]."""
        return self.cache._tensors[self.index]


class ReplayCache:
    """Checkpoint and buffer of ``slots`` sequences in ``layers`` layers of one layout.

    Make one with ``allocate`` or, on memory that an engine owns, with ``over``.

    Attributes:
        layout: sizes, recurrence and precision of every layer.
        layers: L.
        slots: S.
        device: where everything is.
        length: int32 [S], committed entries in the buffer, shared by all layers.
        folds: int32 [S], how often the slot was folded since it was loaded.
        backend: the module that does the arithmetic on the host; ``backend.name`` says which.
        verbs: what carries out step, commit, fold and materialise: ``Host``, or kernels, which do not wait for the
            device.
    """

    def __init__(self, layout: Layout, tensors: list[dict[str, Tensor]], slots: int, seed: int) -> None:
        """Internal: use ``allocate`` or ``over``."""
        self.layout = layout
        self.layers = len(tensors)
        self.slots = slots
        self.seed = checks.integer("seed", seed, 0, 2**63 - 1)
        self.device = tensors[0]["checkpoint"].device
        self.backend = backends.pick(layout, tensors)
        self._tensors = tensors
        with torch.inference_mode(False):
            self.length = torch.zeros(slots, dtype=torch.int32, device=self.device)
            self.folds = torch.zeros_like(self.length)
            # Committed entries above which commit folds; a phase makes it smaller until the first fold.
            self._limit = torch.full_like(self.length, layout.room)
            # Where the next input goes in the ring that holds the convolution's tail.
            self._position = torch.zeros_like(self.length)
            # Uncommitted tokens by layer: of the recurrence (0) and of the convolution (1).
            self._drafts = torch.zeros((2, self.layers, slots), dtype=torch.int32, device=self.device)
            # What operators of a compiled graph claim to change, so that they keep their order; never written.
            self.order = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.number = compiled.register(self)
        self.verbs = backends.kernels(self) or Host(self)

    @classmethod
    def allocate(
        cls, layout: Layout, layers: int, slots: int, device: str | torch.device = "cpu", seed: int = 0
    ) -> ReplayCache:
        """Allocate a cache whose slots all hold the zero state.

        Args:
            layout: of every layer.
            layers: L.
            slots: S, sequences that fit.
            device: "cpu", "cuda", …
            seed: of stochastic rounding.

        Raises:
            ReplayError: a number that is not positive.
        """
        _expect_layout(layout)
        checks.integer("layers", layers, 1)
        checks.integer("slots", slots, 1)
        with torch.inference_mode(False):
            whole = {
                name: backends.cpu.large_pages(
                    torch.empty((layers, slots, *spec.shape), dtype=spec.dtype, device=device)
                )
                for name, spec in layout.tensors.items()
            }
            for name, spec in layout.tensors.items():
                if not spec.entries:
                    whole[name].zero_()
        return cls(layout, [{name: t[i] for name, t in whole.items()} for i in range(layers)], slots, seed)

    @classmethod
    def over(cls, layout: Layout, views: Sequence[Mapping[str, Tensor]], seed: int = 0) -> ReplayCache:
        """A cache over memory that an engine owns; what it holds is taken as it is, with an empty buffer.

        Args:
            layout: of every layer.
            views: for each layer, name -> tensor [slots, …] as ``Layout.tensors`` describes them. Any strides.
            seed: of stochastic rounding.

        Raises:
            ReplayError: a tensor that is missing, unknown, or of another shape, dtype or device.
        """
        _expect_layout(layout)
        if not views:
            raise ReplayError("views: expected one mapping a layer, got none")
        first = views[0].get("checkpoint")
        if not isinstance(first, Tensor) or first.ndim == 0:
            raise ReplayError("views: layer 0 has no tensor 'checkpoint'")
        for index, view in enumerate(views):
            if set(view) != set(layout.tensors):
                raise ReplayError(f"views: layer {index} has {sorted(view)}, expected {sorted(layout.tensors)}")
            for name, spec in layout.tensors.items():
                label = f"views[{index}][{name!r}]"
                dims = [("slots", first.shape[0]), *((str(size), size) for size in spec.shape)]
                checks.shape(label, view[name], dims, layout)
                checks.dtype(label, view[name], (spec.dtype,))
                checks.device(label, view[name], first.device)
        return cls(layout, [dict(view) for view in views], first.shape[0], seed)

    def __getitem__(self, layer: int) -> CacheLayer:
        return CacheLayer(self, self._layer(layer))

    def __repr__(self) -> str:
        return f"ReplayCache({self.layout.recurrence.title}, layers={self.layers}, slots={self.slots}, {self.device})"

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, bookkeeping included."""
        books = (self.length, self.folds, self._limit, self._position, self._drafts)
        return self.layers * self.slots * self.layout.slot_bytes + sum(t.nbytes for t in books)

    def views(self) -> list[dict[str, Tensor]]:
        """The tensors themselves: for each layer, name -> [slots, …]. What lies at or past ``length`` is undefined."""
        return [dict(tensors) for tensors in self._tensors]

    @torch.no_grad()
    def load(self, layer: int, slots: Integers, state: Tensor, phase: Integers | int | None = None) -> None:
        """Start sequences from a state, such as a prefill's. What the slots held before is gone.

        A slot's buffer is emptied for every layer at once, so load all layers before the slot's next step. The
        convolution's tail is not part of ``state``: ``load_conv`` sets it.

        Args:
            layer: index.
            slots: [R], −1 is skipped.
            state: [R, H, P, K] in float32, the activation dtype or the checkpoint's (where that is a dtype).
            phase: moves the first fold, so that rows which start together do not fold together: a number that
                belongs to the request, such as its prompt length; one for all or [R]. None: no shift.

        Raises:
            ReplayError: see ``checks``. Nothing was written.
        """
        layer = self._layer(layer)
        rows = self._slots("slots", slots)
        layout, kept = self.layout, self.layout.precision.checkpoint
        labels = zip(("heads", "head_dim", "state_dim"), layout.state_shape, strict=True)
        checks.shape("state", state, [("R", len(rows)), *labels], layout)
        checks.dtype("state", state, (layout.wide, layout.dtype, *([kept] if isinstance(kept, torch.dtype) else [])))
        checks.device("state", state, self.device)
        shift = self._phase(phase, len(rows))
        keep, index = self._live(rows)
        counter = torch.zeros_like(index)
        self._store(layer, index, state[keep].to(layout.wide), counter)
        self.length[index] = 0
        self.folds[index] = 0
        self._limit[index] = layout.room - shift[keep]
        self._drafts[:, :, index] = 0

    @torch.no_grad()
    def load_conv(self, layer: int, slots: Integers, tail: Tensor) -> None:
        """Set the convolution's tail: the last ``width - 1`` inputs, oldest first.

        Args:
            layer: index.
            slots: [R], −1 is skipped.
            tail: [R, channels, width − 1] in the activation dtype.
        """
        layer = self._layer(layer)
        conv = self._conv()
        rows = self._slots("slots", slots)
        dims = [("R", len(rows)), ("channels", conv.channels), ("width - 1", conv.width - 1)]
        checks.shape("tail", tail, dims, self.layout)
        checks.dtype("tail", tail, (self.layout.dtype,))
        checks.device("tail", tail, self.device)
        keep, index = self._live(rows)
        ring = self._tensors[layer]["conv"]
        ring[index[:, None], :, self.ring_places(index, 1 - conv.width, 0)] = tail[keep].transpose(1, 2)

    @torch.no_grad()
    def conv_tail(self, layer: int, slots: Integers) -> Tensor:
        """The last ``width - 1`` committed inputs of the convolution: [R, channels, width − 1]; zero for padding."""
        layer = self._layer(layer)
        conv = self._conv()
        rows = self._slots("slots", slots)
        keep, index = self._live(rows)
        ring = self._tensors[layer]["conv"]
        out = ring.new_zeros((len(rows), conv.channels, conv.width - 1))
        out[keep] = ring[index[:, None], :, self.ring_places(index, 1 - conv.width, 0)].transpose(1, 2)
        return out

    @torch.no_grad()
    def commit(self, rows: Rows, accepted: Integers, path: Tensor | Sequence[Sequence[int]] | None = None) -> None:
        """Make the first ``accepted`` tokens of each row part of its sequence and drop the rest; once per model step.

        Rows that would have no room for ``max_draft`` more tokens are folded, in every layer.

        Args:
            rows: as they were stepped.
            accepted: [R], 0…tokens of the row. 0 means that the step never happened.
            path: [R, ≤ T] for trees: row-local numbers of the accepted tokens from the root on, padded with −1.

        Raises:
            ReplayError: a count outside 0…drafted, a path that is none, or a layer that was not stepped. Nothing was
                written.
        """
        if torch.compiler.is_compiling():
            compiled.commit(self, rows, accepted, path)  # type: ignore[arg-type]
        else:
            self.verbs.commit(rows, accepted, path)

    @torch.no_grad()
    def fold(self, slots: Integers) -> None:
        """Rewrite the checkpoints from the buffers now and empty the buffers. Uncommitted drafts are dropped.

        ("Flush" in some papers.) Recomputed from the raw inputs and the checkpoint, in every layer.
        """
        self.verbs.fold(slots)

    @torch.no_grad()
    def fork(self, src: Integers, dst: Integers) -> None:
        """Copy the committed sequences of ``src`` [R] into ``dst`` [R], as if all at once.

        A source may come several times; a destination once, and what it held is gone. They may overlap, as a beam
        search's reordering does. Uncommitted drafts are not copied.
        """
        source = checks.int_vector("src", src, torch.device("cpu")).tolist()
        target = checks.int_vector("dst", dst, torch.device("cpu")).tolist()
        if len(source) != len(target):
            raise ReplayError(f"dst: expected as many slots as src ({len(source)}), got {len(target)}")
        checks.slots("src", source, self.slots, unique=False, padding=False)
        checks.slots("dst", target, self.slots, padding=False)
        pairs = [(s, d) for s, d in zip(source, target, strict=True) if s != d]
        self._drafts[:, :, target] = 0
        if not pairs:
            return
        a, b = (torch.tensor(column, device=self.device) for column in zip(*pairs, strict=True))
        for tensor in (self.length, self.folds, self._limit, self._position):
            tensor[b] = tensor[a]
        for tensors in self._tensors:
            for tensor in tensors.values():
                tensor[b] = tensor[a]

    @torch.no_grad()
    def reset(self, slots: Integers) -> None:
        """Give the slots the zero state, an empty buffer and a zero convolution tail."""
        _, index = self._live(self._slots("slots", slots))
        for tensor in (self.length, self.folds, self._position):
            tensor[index] = 0
        self._limit[index] = self.layout.room
        self._drafts[:, :, index] = 0
        for tensors in self._tensors:
            for name, spec in self.layout.tensors.items():
                if not spec.entries:  # zero bytes are the zero state in every format
                    tensors[name][index] = 0

    @torch.no_grad()
    def materialise(self, layer: int, slots: Integers) -> Tensor:
        """The state after the committed tokens: [R, H, P, K] in float32 (zero for padding). Changes nothing."""
        layer = self._layer(layer)
        given = self._slots("slots", slots)
        keep, index = self._live(given)
        out = torch.zeros((len(given), *self.layout.state_shape), dtype=self.layout.wide, device=self.device)
        out[keep] = self.verbs.materialise(layer, index)
        return out

    @torch.no_grad()
    def export(self, slots: Integers) -> dict[str, Tensor]:
        """Everything about the slots' committed sequences, on the CPU, as safetensors can store it.

        ``import_`` puts it into another cache, of another window, precision or device, or back into this one.
        """
        values = checks.int_vector("slots", slots, torch.device("cpu")).tolist()
        checks.slots("slots", values, self.slots, padding=False)
        self.check()
        return transfer.pack(self, values)

    @torch.no_grad()
    def import_(self, slots: Integers, data: Mapping[str, Tensor], phase: Integers | int | None = None) -> None:
        """Put exported sequences into ``slots`` [R]; what these held is gone.

        The outputs afterwards are the same: to the bit where layout and precision are, to rounding where they differ.

        Args:
            slots: [R].
            data: of ``export``.
            phase: as ``load`` takes it, for another request that goes on from here: where a sequence was loaded and
                has no entries yet, it folds as if this request had loaded it. None: as the exported one would.

        Raises:
            ReplayError: the data are foreign, truncated or of another recurrence or shape. Nothing was written.
        """
        values = checks.int_vector("slots", slots, torch.device("cpu")).tolist()
        checks.slots("slots", values, self.slots, padding=False)
        shift = None if phase is None else self._phase(phase, len(values))
        transfer.unpack(self, values, data)
        if shift is not None:
            _, index = self._live(values)
            fresh = (self.length[index] == 0) & (self.folds[index] == 0)
            self._limit[index] = torch.where(fresh, self.layout.room - shift, self._limit[index])

    def check(self) -> None:
        """Raise for what kernels found wrong since the last check, such as a slot out of range. Waits for the device.

        On the CPU every verb checks at once. On CUDA the verbs that read values (``materialise``, ``export``,
        ``reset``, …) check as well; ``step``, ``commit`` and ``fold`` never wait.
        """
        self.verbs.check()

    def ring_places(self, index: Tensor, start: int, stop: int) -> Tensor:
        """Places [R, stop−start] in the convolution's ring of the inputs ``start…stop-1`` counted from the next one."""
        ring = self.layout.tensors["conv"].shape[1]
        return (self._position[index, None].long() + torch.arange(start, stop, device=self.device)) % ring

    def _store(self, layer: int, index: Tensor, state: Tensor, counter: Tensor) -> None:
        """Write checkpoints and their read copies."""
        for name, part in precision.write(state, self.layout.precision, self.seed, layer, counter).items():
            self._tensors[layer][name][index] = part

    def _layer(self, layer: int) -> int:
        return checks.integer("layer", layer, 0, self.layers - 1)

    def _conv(self) -> Conv:
        if self.layout.conv is None:
            raise ReplayError("conv: the layout has no convolution; give it conv=Conv(channels, width)")
        return self.layout.conv

    def _slots(self, name: str, slots: Integers) -> list[int]:
        self.check()
        values = checks.int_vector(name, slots, torch.device("cpu")).tolist()
        checks.slots(name, values, self.slots)
        return values

    def _live(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Which rows are no padding [R'], and their slots [R'], both int64."""
        keep = [r for r, slot in enumerate(rows) if slot >= 0]
        live = [rows[r] for r in keep]
        return tuple(torch.tensor(v, dtype=torch.int64, device=self.device) for v in (keep, live))  # type: ignore

    def _phase(self, phase: Integers | int | None, rows: int) -> Tensor:
        if phase is None:
            phase = 0
        if isinstance(phase, int):
            phase = [phase] * rows
        if isinstance(phase, Tensor) and phase.ndim == 1 and not phase.is_floating_point():
            phase = phase.tolist()
        if not isinstance(phase, Sequence) or len(phase) != rows:
            got = len(phase) if isinstance(phase, Sequence) else phase
            raise ReplayError(f"phase: expected one number or one a row ({rows}), got {got}")
        for number in phase:
            checks.integer("phase", number, 0)
        return torch.tensor(
            [number % (self.layout.room + 1) for number in phase], dtype=torch.int32, device=self.device
        )


def _expect_layout(layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise ReplayError(f"layout: expected a Layout, got {type(layout).__name__}")
