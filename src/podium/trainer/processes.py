"""Training on several processes, with accelerate: one API over DDP, FSDP2 and DeepSpeed.

    one process   nothing
    DDP           every process has all weights; gradients are reduced in the last backward of a step
    FSDP2         every process has a part of every tensor; each forward and each backward is collective
    HSDP          FSDP2 over groups of processes, such as those of a machine, which all have the same parts
    DeepSpeed     each backward is collective, with ZeRO-3 each forward, too

Where forwards and backwards are collective, all processes must run the same number of them, or the run hangs:
`num_dummy_forwards` is the number that a process with less work adds. Sampling takes a different number of steps on
every process, so `full_weights` gathers sharded weights once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    broadcast_object_list,
    gather_object,
)
from accelerate.utils.fsdp_utils import disable_fsdp_ram_efficient_loading
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from podium.errors import CheckpointError, ConfigError, Finding, LostProcessError, PodiumError
from podium.errors.texts import clean
from podium.models.forward import base_model
from podium.models.reference import Reference
from podium.trainer import parts
from podium.trainer.planned import GROUPS, launch_planned

logger = logging.getLogger(__name__)

Division = Literal["one", "ddp", "fsdp2", "deepspeed"]

NOT_OF_DATA = ("tp_size", "cp_size", "sp_size")
"""Sizes of accelerate's groups of processes that share a layer or a sequence."""

T = TypeVar("T")


def broadcast_from_main(value: T) -> T:
    """The first process's value on every process, for choices that are measured or tried and could differ."""
    return cast("list[T]", broadcast_object_list([value]))[0]


_GONE = ("gloo", "closed by peer", "reset by peer")
"""Words of the error of a collective operation whose other side has gone."""


def lost_process(error: Exception) -> LostProcessError | None:
    """The message for an operation that failed since another process of the run has; None: it failed otherwise."""
    text = str(error)
    if isinstance(error, LostProcessError):
        return error
    if isinstance(error, PodiumError) or not (isinstance(error, DistError) or any(sign in text for sign in _GONE)):
        return None
    waited = re.search(r"[Tt]imed out waiting (\d+)ms", text)
    if waited is None:
        return LostProcessError(
            f"Another process of this run has ended, or cannot be reached: {clean(text.splitlines()[0])}",
            first=clean(text.splitlines()[0]),
        )
    what = f"Another process of this run did not answer for {int(waited[1]) / 1000:g} s: it was stopped, or hangs."
    lost = LostProcessError(what, fix="if it was only slow: a larger ddp_timeout (seconds)")
    lost.is_silent = True
    return lost


def differing_rows(digests: Sequence[str | None]) -> Finding | None:
    """The finding for processes that read other rows, by the digest of each; None where one has no digest.

    >>> differing_rows(["aa", "aa"])
    >>> differing_rows(["aa", "aa", "bb"]).what
    'process 2 has other training rows than process 0 (SHA-256 bb and aa)'
    """
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None or None in digests:
        return None
    shown_digests = str(digests[other])[:8]
    first_digests = str(digests[0])[:8]
    return Finding(
        code="D061",
        severity="error",
        what=f"process {other} has other training rows than process 0 (SHA-256 {shown_digests} and {first_digests})",
        why="every process draws its prompts from all rows, by number",
        fix="make the dataset the same way on all of them: a seed for every shuffle, and nothing by RANK",
        facts={"other": other, "digests": shown_digests, "first_digests": first_digests},
    )


def of_all_ranks(places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Values of this process's prompts and of all others', in the order of the round."""
    gathered = gather_object([*zip(places, values, strict=True)])
    return [value for _, value in sorted(gathered, key=lambda pair: pair[0])]


class ScoresByProcess:
    """Counts which processes get numbers from the reward functions over a run; W019 once where one gets none."""

    CHANCE = 1 / 500
    """Probability, where prompts without a number fall on processes at random, under which it is said of a function."""

    def __init__(self, num_functions: int, num_processes: int) -> None:
        self._prompts_RK2 = np.zeros((num_processes, num_functions, 2), int)
        """Prompts of each process (R) without and with a number from each function (K)."""
        self._said: set[str] = set()

    def findings(self, rewards_PGK: np.ndarray, names_K: Sequence[str], ranks_P: Sequence[int]) -> Iterator[Finding]:
        """What is new after a round of all processes; `ranks_P` sampled its prompts."""
        size = rewards_PGK.shape[1]
        unscored_P = np.isnan(rewards_PGK).all(axis=2).sum(axis=1)
        by_rank = {rank: unscored_P[np.equal(ranks_P, rank)] for rank in sorted(set(ranks_P))}
        if any(found.any() for rank, found in by_rank.items() if rank) and "" not in self._said:
            self._said.add("")
            counts = ", ".join(f"process {rank}: {x.sum()} of {x.size * size}" for rank, x in by_rank.items())
            shown_size = size * len(ranks_P)
            yield Finding(
                code="W019",
                severity="warning",
                what=f"All reward functions returned None for {int(unscored_P.sum())} of {shown_size} "
                f"completions of a round, which are not trained on: {counts}.",
                why="what a function needs may be missing there: a server, a file, a variable",
                fix="have a function raise where it cannot judge: then the run ends with what it says",
                facts={"unscored": int(unscored_P.sum()), "size": shown_size, "counts": counts},
            )
        has_number_PK = (~np.isnan(rewards_PGK)).any(axis=1).astype(int)
        for k, name in enumerate(names_K):
            np.add.at(self._prompts_RK2[:, k], (list(ranks_P), has_number_PK[:, k]), 1)
            rank = self._only_none(*self._prompts_RK2[:, k].T)
            if rank is not None and len(names_K) > 1 and name not in self._said:
                self._said.add(name)
                count = int(self._prompts_RK2[rank, k].sum()) * size
                yield Finding(
                    code="W019",
                    severity="warning",
                    what=f"`{name}` returned None for all {count} completions of process {rank}, and a number "
                    "for each one of the others.",
                    why="what the function needs may be missing there (a server, a file, a variable): "
                    "completions are paid by process",
                    fix="have the function raise where it cannot judge: then the run ends with what it says",
                    facts={"name": name, "size": count, "rank": rank},
                )

    def _only_none(self, without_R: np.ndarray, with_R: np.ndarray) -> int | None:
        """The process none of whose prompts has a number, where all of the others have one, and not by chance."""
        [ranks] = np.nonzero(without_R)
        if len(ranks) != 1 or with_R[ranks[0]]:
            return None
        ways = math.comb(int(without_R.sum() + with_R.sum()), int(without_R.sum()))
        return int(ranks[0]) if ways * self.CHANCE > 1 else None


# ---- before weights load ----


def fsdp_version(args: Any) -> int | None:
    """Version of FSDP that a config, a flag or accelerate's launcher sets; None: no FSDP."""
    if args.fsdp_plugin_args is not None:
        return int(args.fsdp_plugin_args["fsdp_version"])
    if (launch := launch_planned()) is not None:
        return launch.fsdp
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return int(os.environ.get("FSDP_VERSION", "1")) if asked else None


def zero_stage(owner: Any) -> int | None:
    """DeepSpeed's stage, by the plugin in the arguments or in accelerate's state; None: no DeepSpeed."""
    plugin = getattr(owner, "deepspeed_plugin", None)
    if plugin is not None:
        return int(plugin.zero_stage)
    launch = launch_planned()
    return None if launch is None else launch.zero


def divides_weights(args: Any) -> bool:
    """Whether weights are sharded over processes (FSDP, ZeRO-3)."""
    return zero_stage(args) == 3 or (args.world_size > 1 and fsdp_version(args) is not None)


def parallelism(args: Any) -> ParallelismConfig | None:
    """Return the sizes of groups of processes, by the arguments or accelerate's launcher; None: one group."""
    if getattr(args, "parallelism_config", None) is not None:
        return cast(ParallelismConfig, args.parallelism_config)
    asked = os.environ.get(GROUPS, "false").lower() == "true"
    return ParallelismConfig() if asked else None


def num_shards(args: Any) -> int:
    """Return over how many processes weights are divided: with HSDP those of one copy; 1: each has all of them."""
    if not divides_weights(args):
        return 1
    replicas = 1
    if (launch := launch_planned()) is not None:
        replicas = launch.replicas
    elif (groups := parallelism(args)) is not None:
        replicas = int(groups.dp_replicate_size)
    return int(args.world_size // replicas)


def refuse_sharded_stage(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where the trainer of a stage would divide weights, which the next could not take over.

    `config`: the stage's settings as they were given. Names what the user typed.
    """
    sharding = [key for key in ("fsdp", "deepspeed") if config.get(key)]
    launch = launch_planned()
    fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true" if launch is None else launch.fsdp is not None
    zero = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" if launch is None else launch.zero is not None
    sharding += [word for word, used in (("--accelerate fsdp2", fsdp), ("--accelerate zero1 to zero3", zero)) if used]
    if sharding:
        raise ConfigError(
            f"{sharding[0]}: stages pass the weights on in one piece, which FSDP and DeepSpeed do not keep. Run the "
            "stages one by one: a recipe each, with `model:` the folder of the one before.",
            code="C030",
        )


def refuse_undividable(args: Any, *, adapter: bool) -> None:
    """Refuse settings that sharding rules out.

    Raises:
        ConfigError: FSDP 1; layers or sequences that are divided; a copy of sharded weights; vLLM, or a reference of
            all weights, under ZeRO-3.
    """
    groups = parallelism(args) if args.world_size > 1 and launch_planned() is None else None
    if any(getattr(groups, size, 1) > 1 for size in NOT_OF_DATA):
        raise ConfigError(
            f"parallelism_config divides layers or sequences over processes ({', '.join(NOT_OF_DATA)}), and Podium "
            "divides weights alone.",
            fix="Set dp_replicate_size and dp_shard_size alone, or leave parallelism_config out.",
            settings=("parallelism_config",),
        )
    if args.world_size > 1 and fsdp_version(args) == 1:
        raise ConfigError(
            "FSDP version 1 is not supported. Ask for version 2: `fsdp_version: 2` in accelerate's config "
            "file, --fsdp_version 2 for `accelerate launch`, or `podium train ... --accelerate fsdp2`."
        )
    if args.async_rollouts and (zero_stage(args) is not None or (args.world_size > 1 and fsdp_version(args))):
        raise ConfigError(
            "async_rollouts copies the policy's weights, which FSDP and DeepSpeed divide over processes.",
            code="C033",
            fix="Leave async_rollouts out, or train with DDP (`--accelerate ddp`).",
            settings=("async_rollouts",),
        )
    if zero_stage(args) == 3 and args.use_vllm:
        raise ConfigError(
            "use_vllm sends the policy's weights, which ZeRO-3 divides in a way that cannot be sent yet.",
            code="C014",
            fix="Use FSDP2 (`--accelerate fsdp2`) or ZeRO-2, or leave use_vllm out.",
            settings=("use_vllm",),
        )
    if zero_stage(args) == 3 and args.beta and not adapter:
        raise ConfigError(
            "beta needs a copy of the model as reference, and ZeRO-3 has divided the one that it would be of.",
            code="C014",
            fix="Use FSDP2 (`--accelerate fsdp2`) or ZeRO-2, train an adapter, or set beta: 0.",
            settings=("beta",),
        )


def prepare_to_load(args: Any, *, adapter: bool) -> None:
    """Have every process read the weights of a model with an adapter. Raises as `refuse_undividable`."""
    if torch.distributed.is_initialized():  # on a CPU transformers (5.17) hands ddp_timeout to nobody
        _set_pg_timeout(timedelta(seconds=args.ddp_timeout))
    if divides_weights(args) and args.product_precision == "bfloat16":
        logger.warning(
            "product_precision: bfloat16 is left out: rounded copies of weights that are divided over processes would "
            "be whole. Matrix products are in float32."
        )
    refuse_undividable(args, adapter=adapter)
    if adapter and fsdp_version(args) == 2:  # an adapter stays whole on every process
        disable_fsdp_ram_efficient_loading()
        if args.fsdp_plugin_args is not None:
            args.fsdp_plugin_args["cpu_ram_efficient_loading"] = False


def whole_at_load(policy: nn.Module, args: Any) -> contextlib.AbstractContextManager[None]:
    """Gather weights that ZeRO-3 sharded while they were loaded, for trials of the model."""
    if zero_stage(args) != 3:
        return contextlib.nullcontext()
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    gathered: contextlib.AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(policy.parameters()))
    return gathered


def optimized_by(optimizer: Any) -> Iterator[nn.Parameter]:
    """The model's parameters that an optimizer steps; DeepSpeed's groups have flat copies of them."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for name in ("bit16_groups", "fp16_groups", "bf16_groups"):
        yield from itertools.chain.from_iterable(getattr(inner, name, ()))
    for group in optimizer.param_groups:
        yield from group["params"]


@contextlib.contextmanager
def groups_left_out_on_cpu(args: Any) -> Iterator[None]:
    """Hide groups of processes from an accelerator on a CPU, where it (1.15) takes none; `shard_on_cpu` does."""
    if args.device.type != "cpu":
        yield
        return
    asked = os.environ.pop(GROUPS, None)
    given = args.parallelism_config
    args.parallelism_config = None
    try:
        yield
    finally:
        args.parallelism_config = given
        if asked is not None:
            os.environ[GROUPS] = asked


def shard_on_cpu(accelerator: Accelerator, args: Any) -> bool:
    """Switch FSDP2 on for processes on a CPU; whether it was asked for.

    accelerate (1.15) silently trains with DDP there, though torch's FSDP2 itself works over gloo.
    """
    state = accelerator.state
    if fsdp_version(args) != 2 or state.distributed_type != DistributedType.MULTI_CPU:
        return False
    if (groups := parallelism(args)) is not None:
        state.parallelism_config = groups
        state.device_mesh = groups.get_device_mesh("cpu")
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))
    if accelerator.mixed_precision != "no":  # as accelerate does on GPUs
        state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision)
    state.distributed_type = DistributedType.FSDP
    return True


# ---- while training ----


class Processes:
    """The division of work over this run's processes; one for each trainer."""

    def __init__(self, accelerator: Accelerator, touch: Callable[[nn.Module], None]) -> None:
        """`touch` runs a forward of one token, without gradients."""
        self.accelerator = accelerator
        self.model: nn.Module | None = None
        """The sharded policy (FSDP2)."""
        self.touch = touch
        self._depth = 0
        self._copied: list[nn.Parameter] = []
        by_kind: dict[Any, Division] = {DistributedType.FSDP: "fsdp2", DistributedType.DEEPSPEED: "deepspeed"}
        otherwise: Division = "ddp" if accelerator.num_processes > 1 else "one"
        self.division: Division = by_kind.get(accelerator.distributed_type, otherwise)
        self.in_lockstep = self.division in ("fsdp2", "deepspeed")
        """Whether all processes must run the same number of forwards and backwards, through the same modules."""
        self.zero3 = zero_stage(accelerator.state) == 3
        self.sharded = self.division == "fsdp2" or self.zero3
        """Whether no process has all weights."""

    def num_dummy_forwards(self, forwards: int) -> int:
        """Forwards to add to those that this process needs, so that all run the same number."""
        return max(gather_object([forwards])) - forwards if self.in_lockstep else 0

    def num_dummy_backwards(self, backwards: int) -> int:
        """The same of backwards, of which every process runs at least one in a step."""
        return self.num_dummy_forwards(max(backwards, 1)) + (backwards == 0)

    # ---- sharding ----

    def shard(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """Shard the policy (FSDP2) before anything is sampled; the Trainer would do so when training begins.

        Trained tensors of an adapter are small and stay whole on every process: `average` reduces their gradients.
        """
        plugin = self.accelerator.state.fsdp_plugin
        assert plugin is not None
        if isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
            # Gradients of every pack are summed over processes and added up; in bfloat16 that rounds once a pack.
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
        ignored = plugin.ignored_modules
        wrapped = plugin.transformer_cls_names_to_wrap
        if wrapped is None:
            # Composite classes name layers of parts that a checkpoint need not have; accelerate (1.15) refuses those.
            present = {type(module).__name__ for module in model.modules()}
            named = base_model(model)._no_split_modules or ()
            plugin.transformer_cls_names_to_wrap = [name for name in named if name in present]
        if isinstance(model, PeftModel):
            self._copied = [p for name, p in model.named_parameters() if p.requires_grad or ".ref." in f"{name}."]
            ids = {id(p) for p in self._copied}
            plugin.ignored_modules = [m for m in model.modules() if any(id(p) in ids for p in m.parameters(False))]
            plugin.cpu_ram_efficient_loading = False
            for parameter in self._copied:
                parameter.data = parameter.data.to(self.accelerator.device)
        prepared, optimizer = self.accelerator.prepare(model, optimizer)
        # The plugin is that of the process, and outlives this model.
        plugin.ignored_modules = ignored
        plugin.transformer_cls_names_to_wrap = wrapped
        cast(Any, self.accelerator).prepare = _prepare_once(self.accelerator.prepare)
        self.model = prepared
        return prepared, optimizer

    @contextlib.contextmanager
    def full_weights(self, model: nn.Module) -> Iterator[None]:
        """Inside, this process has all weights of the policy, and its forwards are not collective.

        All processes enter and leave together. Under an adapter with `reshard_after_forward: false` the base, which
        never changes, stays gathered from the first time on.
        """
        self._depth += 1
        try:
            with self._gathered(model) if self.sharded and self._depth == 1 else contextlib.nullcontext():
                yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def _gathered(self, model: nn.Module) -> Iterator[None]:
        if self.zero3:
            from trl.models import unwrap_model_for_generation

            with unwrap_model_for_generation(cast(Any, model), self.accelerator):
                yield
            return
        assert isinstance(self.model, FSDPModule)
        reshard = bool(cast(Any, self.accelerator.state.fsdp_plugin).reshard_after_forward)
        units = _units(self.model)
        self._reshard_after_forward(reshard=False)
        self.touch(self.model)  # gathers all layers that a forward passes, one after the other
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            if reshard or not self._copied:
                for unit in units:
                    unit.reshard()
            else:
                self.model.set_reshard_after_backward(False)
            self._reshard_after_forward(reshard=reshard)

    def reshard(self, model: nn.Module) -> None:
        """Free layers that forwards without a backward leave gathered."""
        if self.division == "fsdp2" and not self._depth and not self._copied:
            for unit in _units(model):
                unit.reshard()

    def _reshard_after_forward(self, *, reshard: bool) -> None:
        """As accelerate sets it: the head stays, as a forward ends and the backward begins with it."""
        model = cast(Any, self.model)
        model.set_reshard_after_forward(reshard)
        for kept in (model.get_output_embeddings(), model):
            if isinstance(kept, FSDPModule):
                kept.set_reshard_after_forward(False, recurse=False)

    # ---- gradients ----

    @contextlib.contextmanager
    def accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one of several packs of a step."""
        if self.division == "deepspeed":  # it steps in the backward that synchronises
            state = self.accelerator.gradient_state
            before = self.accelerator.sync_gradients
            state._set_sync_gradients(before and last)
            try:
                yield
            finally:
                state._set_sync_gradients(before)
        elif self.division == "fsdp2":  # or gradients as large as the whole model would gather on each process
            cast(Any, model).set_requires_gradient_sync(True)
            yield
        else:
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                yield

    def backward(self, loss: Tensor) -> None:
        """Backward of a share of the loss: gradients are averaged over processes, and shares add up."""
        plain = {"scale_wrt_gas": False} if self.division == "deepspeed" else {}
        self.accelerator.backward(loss * self.accelerator.num_processes, **plain)

    def average(self) -> None:
        """Once a step: the mean over processes of the gradients that no wrapper reduces."""
        trained = [p for p in self._copied if p.requires_grad]
        if not trained:
            return
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = [cast(Tensor, p.grad) for p in trained]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        flat /= self.accelerator.num_processes
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    # ---- checkpoints ----

    def full_state(self, model: nn.Module) -> dict[str, Tensor]:
        """For `save_pretrained`, on the first process: all weights, or the adapter's; all processes call it."""
        copied = {id(p) for p in self._copied}
        if copied:
            return {name: p.detach().cpu() for name, p in model.named_parameters() if id(p) in copied}
        state = model.state_dict(keep_vars=True)
        gathered: dict[int, Tensor] = {}
        for x in {id(x): x for x in state.values()}.values():  # tied weights once
            whole = (x.full_tensor() if isinstance(x, DTensor) else x).detach()
            gathered[id(x)] = whole.cpu() if self.accelerator.is_main_process else whole.new_empty(0)
        return {name: gathered[id(x)] for name, x in state.items()}

    def save_parts(self, folder: Path, model: nn.Module, optimizer: Any, reference: Reference | None) -> None:
        """Write this process's part of the trained weights, of the optimizer and of a reference that has moved."""
        rank = self.accelerator.process_index
        parts.save_weights(model, folder, parts.WEIGHTS, rank, trained=True)
        if reference is not None and reference.moved:
            parts.save_weights(cast(nn.Module, reference.copy), folder, parts.REFERENCE, rank)
        parts.save_optimizer(optimizer, folder, rank)

    def check_parts(self, folder: Path) -> None:
        """Raise `CheckpointError` where a checkpoint cannot be put together as this run divides its weights.

        Parts of FSDP2 can be, for any number of processes; DeepSpeed reads what it has written itself, divided alike.
        """
        was = _written(folder)
        now = self._writes
        if was.words == now.words or (was.kind in ("fsdp2", now.kind) and now.kind != "deepspeed"):
            return
        raise CheckpointError(
            f"{folder} was written by {was.words}, and this run has {now.words}: its optimizer cannot be put together. "
            f"Resume {was.again}, or start a new run from its weights: `model: {folder}`.",
            settings=("model",),
            folder=folder,
            was=was.words,
            now=now.words,
            again=was.again,
        )

    @property
    def _writes(self) -> Written:
        """The division of this run's checkpoints."""
        count = self.accelerator.num_processes
        if self.division == "deepspeed":
            return _by_deepspeed(zero_stage(self.accelerator.state) or 0, count)
        return _in_parts(count) if self.division == "fsdp2" else WHOLE


class Written(NamedTuple):
    """A division of weights and optimizer over the files of a checkpoint."""

    kind: Literal["whole", "fsdp2", "deepspeed"]
    words: str
    again: str
    """How to start a run that reads it."""


WHOLE = Written("whole", "processes with whole weights", "without FSDP and DeepSpeed")


def _in_parts(count: int) -> Written:
    words = f"{count} processes with sharded weights (FSDP2)"
    return Written("fsdp2", words, f"with `--processes {count} --accelerate fsdp2`")


def _by_deepspeed(stage: int, count: int) -> Written:
    """Return DeepSpeed's division: the same for ZeRO-1 and 2, and without ZeRO for any number of processes."""
    if stage == 0:
        return Written("deepspeed", "processes with DeepSpeed (without ZeRO)", "with a DeepSpeed config of stage 0")
    name = "ZeRO-3" if stage == 3 else "ZeRO-1 or 2"
    flags = f"--processes {count} --accelerate zero{stage}"
    return Written("deepspeed", f"{count} processes with DeepSpeed ({name})", f"with `{flags}`")


def _written(folder: Path) -> Written:
    """Return the division of a checkpoint, by the names of its files."""
    if count := parts.num_parts(folder):
        return _in_parts(count)
    by_deepspeed = next(folder.glob("global_step*"), None)
    if by_deepspeed is None:
        return WHOLE
    count = len([*by_deepspeed.glob("*_optim_states.pt")])
    is_third = any(by_deepspeed.glob("zero_pp_rank_*_model_states.pt"))
    stage = 3 if is_third else 2
    return _by_deepspeed(stage if count else 0, count)


def _prepare_once(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator.prepare`, without what is prepared already.

    For FSDP2 it finds parameters by their address, which empty parts of small tensors share.
    """

    def once(*objects: Any, **kwargs: Any) -> Any:
        if all(getattr(x, "_is_accelerate_prepared", False) for x in objects):
            return objects if len(objects) > 1 else objects[0]
        return prepare(*objects, **kwargs)

    return once


def without_autocast_wrapper(accelerator: Accelerator) -> None:
    """Have accelerate leave a prepared model's `forward` without autocast.

    The trainer has autocast around sampling, scoring and training, and must be able to leave it out: the proof on the
    first batch compares in the weights' own precision.
    """
    prepare_model = accelerator.prepare_model

    def prepare(*args: Any, **kwargs: Any) -> Any:
        native = accelerator.native_amp
        accelerator.native_amp = False
        try:
            return prepare_model(*args, **kwargs)
        finally:
            accelerator.native_amp = native  # the scaler of float16 asks for it

    cast(Any, accelerator).prepare_model = prepare


def share_gradient_memory(accelerator: Accelerator) -> None:
    """Have data-parallel gradients be views of the reduced buckets, not copies of 4 bytes a parameter."""
    if accelerator.ddp_handler is None:
        accelerator.ddp_handler = DistributedDataParallelKwargs()
    accelerator.ddp_handler.gradient_as_bucket_view = True


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
