"""The plan of a run on GPUs that need not be here, for `podium check --devices N --gpu NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from podium.checks.model import of_config
from podium.checks.setup import Setup
from podium.errors import PodiumError
from podium.models.builtin import resolve_model
from podium.models.check import read_config
from podium.planning.layouts import Plan, plan_layouts
from podium.rewards.model import RewardModel
from podium.trainer.planned import Launch

UNCOUNTED: Mapping[str, Callable[[Setup], object]] = {
    "the run has stages; give a stage a recipe of its own": lambda setup: setup.stage,
    "use_cpu is true, so the run takes no GPU": lambda setup: setup.given.get("use_cpu"),
    "fsdp or deepspeed in a recipe decides the layout; leave it out": lambda setup: (
        setup.given.get("fsdp") or setup.given.get("deepspeed")
    ),
    "the memory of teacher_model is not counted": lambda setup: setup.settings and setup.settings.teacher_model,
    "the memory of a reward model is not counted": lambda setup: any(
        isinstance(reward.function, RewardModel) for reward in setup.rewards
    ),
    "the memory of vLLM beside the policy (vllm_mode: colocate) is not counted": lambda setup: (
        setup.settings and setup.settings.use_vllm and setup.settings.vllm_mode == "colocate"
    ),
}
"""Reasons why no plan is made, each with the runs that it is about."""


def plan_of(setup: Setup, layouts: Mapping[str, Launch]) -> Plan:
    """The plan of a run, which needs no more of its model than config.json."""
    unknown = next((reason for reason, applies in UNCOUNTED.items() if applies(setup)), "")
    if unknown:
        return Plan(unknown=unknown)
    args = setup.settings
    if args is None:
        return Plan(unknown="there are errors in the settings")
    name = str(setup.given.get("model"))
    unsized = Plan(
        unknown=f"the size of {name} is not known: transformers can build no model from its config.json alone"
    )
    config = setup.config
    if config is None:
        try:
            config = read_config(resolve_model(name), trust_remote_code=args.trust_remote_code)
        except PodiumError:
            return unsized
    make = partial(plan_layouts, layouts=layouts)
    return of_config(make, config, args, setup.train, setup.lora, setup.quantization) or unsized
