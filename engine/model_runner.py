"""The torch thread's work: copies in order, one packed forward, logits where needed, draws.

Nothing else in the engine calls torch once the model is loaded, so device memory is read and
written in program order: a save reads its block before anything scheduled later overwrites it, a
load lands before the pass that reads it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from engine.distribution import PoisonedLogits
from engine.kernels import Kernels
from engine.kv_cache import KVCache
from engine.kv_groups import KVGroup
from engine.outputs import TokenLogprobs
from engine.paged_batch import GroupedBatch, PagedBatch
from engine.sampler import Sampled, Unsampled, on_host, prompt_logprobs, sample_run
from engine.slot_error import compare
from engine.step import AuditInput, AuditOutput, SequenceInput, StepInput, StepOutput
from offload.transfers import CopyIn, CopyOut


@dataclass(frozen=True, slots=True)
class PackedInput:
    """One row of varying-length sequences; T tokens in all, L of them with logits."""

    input_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]
    logit_rows: Tensor  # int64 [L], ascending
    batch: GroupedBatch
    run_slices: Sequence[slice]  # per sequence, which of the L rows draw tokens
    prompt_slices: Sequence[slice]  # per sequence, which of the L rows predict its prompt
    witnesses: Mapping[int, int]  # sequences that draw nothing -> the L row of their last token


class ModelRunner:
    """Runs steps. Every method is called on the torch thread alone."""

    def __init__(
        self,
        model: nn.Module,
        kv: KVCache,
        kernels: Kernels | None,
        vocab_size: int,
        groups: Sequence[KVGroup],
    ) -> None:
        """`kernels` None: attention by the plain reference. `groups` hold every layer once."""
        self.groups = tuple(groups)
        places = {
            layer: (group.index, place)
            for group in groups
            for place, layer in enumerate(group.layers)
        }
        self._places = [places[layer] for layer in range(len(places))]
        self._model = model
        self._kv = kv
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._block_size = kv.layout.block_size
        self._device = kv.device

    def execute(self, step: StepInput) -> StepOutput:
        """Copies always happen; a failing pass is returned as `StepOutput.error`."""
        started = time.perf_counter()
        self._copy_out(step.copies_out)
        copied_out = time.perf_counter()
        self._copy_in(step.copies_in)
        copied_in = time.perf_counter()
        output = StepOutput()
        if step.sequences:
            try:
                output = self._forward(step.sequences)
            except Exception as error:  # whatever a model raises ends these requests alone
                output = StepOutput(error=error)
        return dataclasses.replace(
            output,
            seconds=time.perf_counter() - copied_in,
            copy_out_seconds=copied_out - started,
            copy_in_seconds=copied_in - copied_out,
        )

    @torch.inference_mode()
    def audit(self, step: AuditInput) -> AuditOutput:
        """A failing pass is returned as `AuditOutput.error`."""
        try:
            self.logits(self.pack(step.sequences))
            layers = [group.layers for group in self.groups]
            return AuditOutput([compare(self._kv, layers[p.group], p) for p in step.pairs])
        except Exception as error:  # whatever a model raises ends this audit alone
            return AuditOutput(error=error)

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[SequenceInput]) -> StepOutput:
        packed = self.pack(sequences)
        logits = self.logits(packed)
        host = on_host(logits)
        draws: list[list[Sampled | Unsampled]] = []
        prompt: list[list[TokenLogprobs]] = []
        poisoned = _poisoned(logits, packed.witnesses)
        slices = zip(packed.run_slices, packed.prompt_slices, strict=True)
        for index, (sequence, (drawn, where)) in enumerate(zip(sequences, slices, strict=True)):
            own = [] if sequence.run is None else sample_run(host[drawn], sequence.run)
            if index in poisoned:
                own = [Unsampled("the model's logits are not finite")]
            wanted, known = sequence.prompt_logprobs, []
            if wanted is not None:
                try:
                    known = prompt_logprobs(logits[where], wanted.next_ids, wanted.num_top)
                except PoisonedLogits as error:
                    own = [Unsampled(str(error))]
            draws.append(own)
            prompt.append(known)
        return StepOutput(draws, prompt)

    @torch.inference_mode()
    def logits(self, packed: PackedInput) -> Tensor:
        """One packed pass; float32 [L, vocab]."""
        output = self._model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=packed.logit_rows,
            paged=packed.batch,
        )
        # Some models pad the vocabulary; a padding id must never be drawn.
        logits: Tensor = output.logits[0, :, : self._vocab_size]
        return logits.float()

    @staticmethod
    def with_logit_rows(packed: PackedInput, logit_rows: Tensor) -> PackedInput:
        """The same pass with logits at other rows."""
        return dataclasses.replace(packed, logit_rows=logit_rows)

    def pack(self, sequences: Sequence[SequenceInput]) -> PackedInput:
        """Lay the sequences end to end.

            sequence 0          sequence 1                     sequence S-1
        |-- rows at start.. --|-- rows at start.. --|  ...  |-- rows at start.. --|
        0             query_start[1]                                              T
        """
        lengths = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)
        starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
        query_start = np.zeros(len(sequences) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start[1:])
        owner = np.repeat(np.arange(len(sequences)), lengths)
        positions = np.arange(query_start[-1]) - query_start[owner] + starts[owner]
        contexts = torch.from_numpy((starts + lengths).astype(np.int32))
        batches = [
            PagedBatch(
                query_start=torch.from_numpy(query_start),
                context_len=contexts,
                block_tables=torch.from_numpy(tables := _tables(sequences, group)),
                slot_mapping=torch.from_numpy(self._slots(tables, owner, positions)),
                kv=self._kv,
                kernels=self._kernels,
                window=group.window,
            )
            for group in self.groups
        ]
        logit_rows, run_slices, prompt_slices, witnesses = _logit_rows(sequences, query_start)
        tokens = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in sequences])
        return PackedInput(
            input_ids=self._tensor(tokens)[None],
            position_ids=self._tensor(positions)[None],
            logit_rows=self._tensor(logit_rows),
            batch=GroupedBatch(batches, self._places),
            run_slices=run_slices,
            prompt_slices=prompt_slices,
            witnesses=witnesses,
        )

    def _slots(self, tables: np.ndarray, owner: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The slot that each row's key and value go to."""
        blocks = tables[owner, positions // self._block_size].astype(np.int64)
        slots: np.ndarray = blocks * self._block_size + positions % self._block_size
        return slots

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _copy_out(self, copies: Sequence[CopyOut]) -> None:
        for copy in copies:
            block = self._kv.pool[copy.block_id]
            for destination in copy.destinations:
                torch.frombuffer(destination, dtype=torch.uint8).copy_(block)

    def _copy_in(self, copies: Sequence[CopyIn]) -> None:
        for copy in copies:
            source = torch.frombuffer(copy.source, dtype=torch.uint8)
            self._kv.pool[copy.block_id].copy_(source)


def _tables(sequences: Sequence[SequenceInput], group: KVGroup) -> np.ndarray:
    """Block tables of one group, int32 [S, longest]."""
    own = [sequence.block_tables[group.index] for sequence in sequences]
    tables = np.zeros((len(own), max(map(len, own))), np.int32)
    for row, table in enumerate(own):
        tables[row, : len(table)] = table
    return tables


def _logit_rows(
    sequences: Sequence[SequenceInput], query_start: np.ndarray
) -> tuple[np.ndarray, list[slice], list[slice], dict[int, int]]:
    """Which packed rows need logits: of each sequence first the prompt's, then those that draw.

    A sequence that draws nothing, a prompt's chunk, gets one for its last row all the same: it has
    read all KV of the chunk, so a NaN shows there before any block is committed.
    """
    rows: list[int] = []
    run_slices: list[slice] = []
    prompt_slices: list[slice] = []
    witnesses: dict[int, int] = {}
    for index, sequence in enumerate(sequences):
        begin, end = int(query_start[index]), int(query_start[index + 1])
        wanted = sequence.prompt_logprobs
        first = len(rows)
        if wanted:
            rows.extend(range(begin, begin + len(wanted.next_ids)))
        prompt_slices.append(slice(first, len(rows)))
        num_drawing = sequence.run.num_rows if sequence.run else 0
        run_slices.append(slice(len(rows), len(rows) + num_drawing))
        rows.extend(range(end - num_drawing, end))
        if not num_drawing:
            witnesses[index] = len(rows)
            rows.append(end - 1)
    return np.array(rows, dtype=np.int64), run_slices, prompt_slices, witnesses


def _poisoned(logits: Tensor, witnesses: Mapping[int, int]) -> set[int]:
    """The sequences whose witness row is not finite."""
    if not witnesses:
        return set()
    finite = torch.isfinite(logits[list(witnesses.values())]).all(dim=1).tolist()
    return {index for index, good in zip(witnesses, finite, strict=True) if not good}
