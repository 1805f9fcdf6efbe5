"""The reference: the policy that training is kept close to, where it started or a slowly following copy.

Of a policy with an adapter it is a second adapter, or the base alone, if one of them is where training starts; else it
is a copy of the whole model.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from podium.models.modes import evaluation_mode

logger = logging.getLogger(__name__)


class Reference:
    """The policy that training is kept close to: where it started, or a slowly following copy."""

    def __init__(self, policy: nn.Module) -> None:
        self.copy: nn.Module | None = None
        self.moved = False
        """Whether it is no longer where training started, so that a checkpoint must hold it."""
        why = own_reference(policy) if isinstance(policy, PeftModel) else ""
        if why:
            logger.info("The reference is a copy of the whole model, as %s.", why)
        if why or not isinstance(policy, PeftModel):
            self.copy = copy.deepcopy(policy).eval().requires_grad_(False)

    def to(self, device: torch.device) -> None:
        """Move the copy, if there is one."""
        if self.copy is not None:
            self.copy.to(device)

    @contextlib.contextmanager
    def model(self, policy: nn.Module) -> Iterator[nn.Module]:
        """Within this context the yielded model computes as the reference does."""
        if self.copy is not None:
            yield self.copy
        elif has_reference_adapter(policy):
            trained = policy.active_adapter
            policy.set_adapter("ref")
            try:
                yield policy
            finally:
                policy.set_adapter(trained)
                freeze_reference_adapter(policy)
        else:
            with policy.disable_adapter():
                yield policy

    @torch.no_grad()
    def follow(self, policy: nn.Module, alpha: float) -> None:
        """pi_ref <- alpha pi + (1 - alpha) pi_ref (TR-DPO, arXiv:2404.09656)."""
        assert self.copy is not None, "only a full copy can follow the policy"
        self.moved = True
        for mine, theirs in zip(self.copy.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs.detach().to(mine.dtype), alpha)


class FollowPolicy(TrainerCallback):
    """Moves the reference towards the policy after every `every` optimizer steps: TRL's `sync_ref_model`."""

    def __init__(self, reference: Reference, *, alpha: float, every: int) -> None:
        self.reference = reference
        self.alpha = alpha
        self.every = every

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before the checkpoint of this step is written, so that it holds the reference as it is from now on."""
        if state.global_step % self.every == 0:
            self.reference.follow(kwargs["model"], self.alpha)


# ---- as an adapter ----


def add_reference_adapter(model: PeftModel) -> None:
    """A frozen copy of the adapter that was passed in: the reference is where training starts, not the base model."""
    config = copy.deepcopy(model.peft_config[model.active_adapter])
    if isinstance(getattr(config, "init_lora_weights", None), str):
        config.init_lora_weights = True  # others, as "pissa", take their start out of the base model
    try:
        model.add_adapter("ref", config)
    except ValueError as error:  # such as "supports only 1 adapter with bias": the reference is a copy of the model
        logger.info("PEFT has no second adapter here: %s", error)
        model.peft_config.pop("ref", None)
        return
    copy_to_reference_adapter(model)


def copy_to_reference_adapter(model: PeftModel) -> None:
    """From here on the policy as it is now is the reference."""
    trained = model.active_adapter
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if f".{trained}." in f"{name}." and (other := _of_reference(name, trained)) in parameters:
                parameters[other].copy_(parameter)
    freeze_reference_adapter(model)


def _of_reference(name: str, trained: str) -> str:
    """The parameter of the reference adapter for one of the trained adapter.

    >>> _of_reference("layers.0.k_proj.ia3_l.default", "default")
    'layers.0.k_proj.ia3_l.ref'
    """
    return f"{name}.".replace(f".{trained}.", ".ref.").removesuffix(".")


def own_reference(model: PeftModel) -> str:
    """Why no switching of adapters gives the policy that training starts from; empty where it does.

    With a reference adapter every trained parameter has a counterpart in it. Without one, the trained adapter is
    switched off: all that is trained must be in it, and it must change nothing yet.
    """
    trained = model.active_adapter
    names = dict(model.named_parameters())
    of_adapter = {name for name in names if f".{trained}." in f"{name}."}
    outside_it = [name for name, p in names.items() if p.requires_grad and name not in of_adapter]
    if outside_it:
        return f"{outside_it[0]} is trained and belongs to no adapter"
    if has_reference_adapter(model):
        lacking = [name for name in of_adapter if _of_reference(name, trained) not in names]
        return f"{lacking[0]} has no counterpart in a second adapter" if lacking else ""
    if any(hasattr(p, "ds_numel") for p in names.values()):  # divided by ZeRO-3: no forward before training
        return ""
    some = torch.arange(8, device=next(iter(names.values())).device)[None]
    with evaluation_mode(model), torch.no_grad():
        here = model(input_ids=some, use_cache=False).logits.float().log_softmax(-1)
        with model.disable_adapter():
            base = model(input_ids=some, use_cache=False).logits.float().log_softmax(-1)
    exact = all(p.dtype == torch.float32 for p in names.values() if p.is_floating_point())
    apart = float((here - base).abs().max())
    tolerance = 0.005 if exact else 0.2
    return "" if apart <= tolerance else f"the new adapter moves log-probabilities by {apart:.2g} nats"


def has_reference_adapter(model: nn.Module) -> bool:
    """Whether `add_reference_adapter` was here."""
    return isinstance(model, PeftModel) and "ref" in model.peft_config


def freeze_reference_adapter(model: nn.Module) -> None:
    """peft unfreezes an adapter whenever it is made the active one, and may freeze the others."""
    for name, parameter in model.named_parameters():
        if ".ref." in f"{name}.":
            parameter.requires_grad_(False)
