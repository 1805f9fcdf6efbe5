"""Forward and backward of a micro-batch: packs, log-probabilities, loss, gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from podium.algorithm.losses import LossInputs, LossSums, keep_high_entropy, policy_loss
from podium.models.devices import kind_of
from podium.models.modes import replaced
from podium.models.packing import Pack, dummy_pack, pack
from podium.trainer.assembly import Parts
from podium.trainer.health import logp_gap
from podium.trainer.nonfinite import WEIGHTS_ALONE, Examination, unexamined, where
from podium.trainer.processes import Processes
from podium.trainer.rounds import MicroBatch, loss_inputs


class PackResult(NamedTuple):
    """Forward and backward of one pack."""

    loss: Tensor
    sums: LossSums
    gaps: list[Tensor]
    """`logp_gap`, where sampler and trainer should agree."""
    metrics: dict[str, float]


class Gradients:
    """Adds the gradients of micro-batches up in a policy's parameters."""

    def __init__(self, processes: Processes, policy: nn.Module) -> None:
        """`policy` without a data-parallel wrapper, which would wait for all ranks in every forward."""
        self.processes = processes
        self.policy = policy
        self.examined: Callable[[Pack], AbstractContextManager[Callable[[LossInputs, Tensor], None]]] = unexamined
        """A context for each pack; see `nonfinite.Examination`."""
        self._zeros: dict[nn.Parameter, Tensor] = {}

    def add(self, model: nn.Module, batch: MicroBatch, parts: Parts, entropy_coef: float) -> list[PackResult]:
        """The gradients of one micro-batch, pack by pack. `model` is the policy as accelerate prepared it."""
        model.train()
        device, trial, results = parts.args.device, batch.trial, list[PackResult]()
        quantile = parts.args.top_entropy_quantile if trial is None else trial.top_entropy_quantile
        if trial is not None:
            parts = dataclasses.replace(
                parts,
                tokens_per_pack=trial.tokens_per_pack,
                forward=dataclasses.replace(parts.forward, precision=trial.precision),
                router_coef=trial.router_coef,
            )
        with parts.forward.context(parts.policy):
            packs = pack(batch.groups, tokens_per_pack=parts.tokens_per_pack, device=device)
            if kind_of(device).host_memory and not self.processes.in_lockstep:
                self._zero_gradients()  # those that are there first leave no holes between activations
            dummies = self.processes.num_dummy_backwards(len(packs))
            keeps, num_kept = self._high_entropy(packs, batch, parts, quantile, dummies)
            for i, (packed, keep_N) in enumerate(zip(packs, keeps, strict=True), start=1):
                inputs = packed, batch, keep_N, num_kept
                accumulating = self.processes.accumulating(model, last=i == len(packs) + dummies)
                with accumulating, self.examined(packed) as look:
                    results.append(self._backward(model, parts, inputs, entropy_coef, look))
            for i in range(dummies, 0, -1):
                with self.processes.accumulating(model, last=i == 1):
                    self._dummy_backward(model, parts)
        return results

    def origin(self, model: nn.Module, batches: Sequence[MicroBatch], parts: Parts, entropy_coef: float) -> str:
        """Where the numbers of a step stop being finite, found by computing it once more; its gradients are lost."""
        examination = Examination(self.policy, parts.tokenizer.decode)
        if self.processes.in_lockstep:
            return where(gather_object([examination.found]), WEIGHTS_ALONE)
        if examination.found is None:
            model.zero_grad()
            once_more = replaced([(self, "examined", examination.of_pack)])
            with examination.watching(), once_more, self.processes.accelerator.no_sync(model):
                for batch in batches:
                    self.add(model, batch, parts, entropy_coef)
        return where(gather_object([examination.found]))

    def _backward(
        self,
        model: nn.Module,
        parts: Parts,
        batch: tuple[Pack, MicroBatch, Tensor | None, float | None],
        entropy_coef: float,
        look: Callable[[LossInputs, Tensor], None] = lambda *_: None,
    ) -> PackResult:
        """One pack: log-probabilities, loss, gradients; `look` before the backward."""
        packed, counts, *_ = batch
        out = parts.forward.token_logps(model, packed, router=bool(parts.router_coef))
        old_logps_N = packed.old_logps_N
        stale = old_logps_N is not None and parts.args.async_rollouts  # they may be the sampled ones themselves
        own_logps_N = out.logps_N if old_logps_N is None else old_logps_N
        gaps = [] if stale or parts.filtered_logps else logp_gap(packed.sampled_logps_N, own_logps_N)
        inputs = loss_inputs(out, *batch, other_sampler=parts.args.use_vllm)
        result = policy_loss(inputs, parts.loss, entropy_coef)
        loss, metrics = result.loss, dict[str, float]()
        if out.router_loss is not None:
            loss = loss + parts.router_coef * packed.num_tokens / max(counts.step_tokens, 1) * out.router_loss
            metrics["aux_loss"] = float(out.router_loss)
        look(inputs, loss)
        self.processes.backward(loss)
        return PackResult(loss.detach(), result.sums, gaps, metrics)

    def _high_entropy(
        self, packs: Sequence[Pack], batch: MicroBatch, parts: Parts, quantile: float, dummies: int
    ) -> tuple[list[Tensor | None], float | None]:
        """Per pack the tokens of high entropy that the policy term keeps, and the divisor of the entropy bonus."""
        if quantile >= 1:
            return [None] * len(packs), None
        with torch.no_grad():
            entropies = [parts.forward.token_logps(self.policy, packed).entropy_N for packed in packs]
            for _ in range(dummies if self.processes.in_lockstep else 0):
                self.processes.touch(self.policy)
        torch.clear_autocast_cache()  # torch 2.10 keeps casts without history, and training would get no gradient
        mine = torch.cat(entropies).tolist() if entropies else []
        over = torch.tensor(gather_object(mine), device=parts.args.device)
        keeps: list[Tensor | None] = [keep_high_entropy(x, quantile, over) for x in entropies]
        return keeps, float(int(keep_high_entropy(over, quantile).sum()) * batch.micro_steps)

    def _dummy_backward(self, model: nn.Module, parts: Parts) -> None:
        """Gradients of zero: without signal the optimizer still steps, for momentum and weight decay.

        With several ranks they come from a backward, so that no other rank waits for this one.
        """
        if self.processes.accelerator.num_processes == 1:
            self._zero_gradients()
            return
        out = parts.forward.token_logps(model, dummy_pack(parts.args.device), router=bool(parts.router_coef))
        self.processes.backward(0 * (out.logps_N.sum() + (0 if out.router_loss is None else out.router_loss)))

    def _zero_gradients(self) -> None:
        """Zeros where there is no gradient; on a CPU in the last step's memory, as new memory is slow to get."""
        for parameter in self.policy.parameters():
            if parameter.requires_grad and parameter.grad is None:
                kept = self._zeros.get(parameter)
                parameter.grad = torch.zeros_like(parameter) if kept is None else kept.zero_()
                if kind_of(parameter.device).host_memory:
                    self._zeros[parameter] = parameter.grad
