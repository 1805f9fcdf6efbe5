"""From TRL's constructor arguments to a run, in the order in which mistakes are cheapest to find."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed as accelerate_seed
from peft import PeftModel
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_utils import set_seed

from podium.agents.chat import tool_format
from podium.agents.environments import EnvironmentPools, placeholder_rows
from podium.agents.resolve import resolve_tools
from podium.agents.setup import GIVEN, Agents, Program
from podium.agents.table import program_reward, resolve_program
from podium.agents.tools import distinct
from podium.algorithm.losses import skips_zero_advantage
from podium.algorithm.metrics import accuracy_name
from podium.data.images import COLUMNS, SEARCHED_ROWS, has_images
from podium.data.prompts import UNWRITTEN, PromptBuilder, check_row
from podium.data.sources import is_read_once, is_stream, undecoded
from podium.data.survey import CheckedRows, checked_rows
from podium.engines.base import RolloutEngine, takes_no_requests
from podium.engines.table import ENGINES, Connection, EngineInputs, choose, connect_vllm
from podium.errors import ConfigError, DataError
from podium.errors.rule import Facts, findings
from podium.errors.texts import listed
from podium.isolation.machine import fit_threads
from podium.models import loading
from podium.models.devices import kind_of
from podium.models.forward import AttentionPath, Forward, Precision, choose_method
from podium.models.head import OwnLogits
from podium.models.images import ImageProcessor
from podium.models.lean import lean_precision
from podium.models.memory import fitting_tokens_per_pack, needs_checkpointing
from podium.models.modes import evaluation_mode
from podium.models.precision import ProductPrecision, measured_products, return_large_blocks, rounds_products
from podium.models.reference import Reference
from podium.records import Prompt
from podium.rewards.adaptive import AdaptiveWeights
from podium.rewards.resolve import (
    LIBRARY,
    Reward,
    as_list,
    check_reward_models,
    check_rewards,
    load_reward_models,
    resolve_rewards,
)
from podium.tester.pretest import refuse_shapes
from podium.trainer.config import GRPOConfig, joined
from podium.trainer.processes import (
    Processes,
    broadcast_from_main,
    divides_weights,
    prepare_to_load,
    whole_at_load,
    zero_stage,
)
from podium.trainer.rounds import Plan, PromptOrder
from podium.trainer.rules import ignored_codes, on_error, unknown_accuracy
from podium.trainer.run import Arguments, Prepared, Rows, Scoring, TrainingRun
from podium.trainer.setting_rules import OF_RUN, PACKAGES, STREAMS, no_router, only_generate
from podium.trainer.settings import (
    advantage_settings,
    call_limits,
    half_dtype,
    loss_settings,
    vllm_settings,
)
from podium.trainer.step import Objective, Policy, Step
from podium.trainer.teacher import POLICY, checked_teacher, load_teacher

logger = logging.getLogger(__name__)

KEPT = ("prompt", *COLUMNS)
"""Columns that `remove_unused_columns` leaves, as in TRL."""


# ---- before weights ----


def prepare_run(given: Arguments) -> Prepared:
    """Check arguments, rewards, batch arithmetic, the model's config, the tokenizer and every row, in this order."""
    model = given.model
    args = given.args
    if args is None:
        args = GRPOConfig(f"{loading.model_name(model)}-GRPO")
    fit_threads()
    load = load_settings(args, given.quantization_config, given.peft_config)
    adapter = load.peft_config is not None or isinstance(model, PeftModel)
    _refuse_wrong(args, adapter=adapter, evaluates=given.eval_dataset is not None)
    pools = environment_pools(given.environment_factory)
    program = program_of(given, args)
    rewards, num_own = reward_records(given.reward_funcs, given.reward_processing_classes, args, pools, program)
    advantage = advantage_settings(args, len(rewards) - num_own, num_own)
    names = [reward.name for reward in rewards]
    accuracy = _accuracy(args, names)
    _say_idle_workers(args, rewards)
    adaptive = AdaptiveWeights.of(names, advantage.weights_K, args.adaptive_rewards)
    plan = plan_of(args)
    config, tokenizer, served = _without_weights(given, args, load)
    images = loading.image_processor(config, model, given.processing_class, load)
    agents = agents_of(given, pools, args, tokenizer, program, images=images)
    room = None if served is None else served.longest
    builder = prompt_builder(args, tokenizer, config, agents, room=room)
    context = builder.context_length if program is None else loading.context_length(config)
    agents = replace(agents, context_length=context, vocabulary=config.get_text_config().vocab_size)
    train, evaluation = _checked_data(args, given, builder, rewards, plan, pools, program)
    rows = None if is_read_once(train) else train
    if agents.rollout_func is None:  # which may add columns that they read
        examples = [row for row in islice(rows or (), 8) if has_prompts([row])]
        examples = [builder.with_images(row, index) for index, row in enumerate(examples)]
        refuse_shapes(rewards, examples, environments=pools is not None)
    return Prepared(
        source=model,
        args=args,
        load=load,
        config=config,
        tokenizer=tokenizer,
        served=served,
        teacher=None if args.teacher_model is None else checked_teacher(args, tokenizer, load, rows, builder),
        agents=agents,
        rows=Rows(builder=builder, order=_prompt_order(train, args, plan), train=train, evaluation=evaluation),
        scoring=Scoring(rewards=rewards, accuracy=accuracy, advantage=advantage, adaptive=adaptive),
    )


def _refuse_wrong(args: GRPOConfig, *, adapter: bool, evaluates: bool) -> None:
    """Raise the errors of settings that this model's kind, folder or machine rules out."""
    facts = Facts(settings=args, adapter=adapter, evaluates=evaluates)
    if wrong := [*findings((*OF_RUN, PACKAGES), facts)]:
        raise joined(type(args), args._given or {}, wrong)


def _without_weights(
    given: Arguments, args: GRPOConfig, load: loading.LoadSettings
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, Connection | None]:
    """The model's config and tokenizer, and vLLM, where it samples."""
    config = loading.load_config(given.model, load)
    if isinstance(given.model, str):
        loading.check_quantization(config, load, args.device)
    tokenizer = loading.load_tokenizer(given.model, given.processing_class, load)
    if not args.use_vllm:
        return config, tokenizer, None
    adapter = load.peft_config
    if isinstance(given.model, PeftModel):
        adapter = given.model.peft_config.get("default")
    return config, tokenizer, connect_vllm(vllm_settings(args), given.model, config, adapter=adapter)


def program_of(given: Arguments, args: GRPOConfig | None) -> Program | None:
    """The program of a trainer's `agent`. Raises `ConfigError` for what does not go together with one."""
    if given.agent is None:
        return None
    others = {"tools": given.tools, "environment": given.environment_factory, "rollout_func": given.rollout_func}
    if other := next((name for name, value in others.items() if value), None):
        raise ConfigError(
            f"`agent` samples its own turns, and so does `{other}`; a run has one of them.",
            code="C065",
            fix="leave one out: a program may call tools by itself",
            settings=("agent", other),
            other=other,
        )
    if args is not None and args.use_vllm and args.vllm_mode == "colocate":
        raise takes_no_requests("vLLM in the trainer's process", ConfigError)
    if args is not None and args.rollout_engine in ENGINES and not ENGINES[args.rollout_engine].interleaves:
        raise takes_no_requests(args.rollout_engine, ConfigError)
    if args is not None and args.teacher_model == POLICY:
        raise ConfigError(
            "teacher_model: policy with an agent: the program writes its prompts, so no teacher_prompt "
            "takes their place, and the policy is compared with itself: the difference is always 0.",
            code="C063",
            fix="teacher_model: another model",
            settings=("agent", "teacher_model"),
        )
    return resolve_program(given.agent)


def _accuracy(args: GRPOConfig, names: Sequence[str]) -> str | None:
    """The reward that tells right from wrong. Raises `ConfigError` where one is named that there is not."""
    wrong = unknown_accuracy(args.accuracy, names)
    if wrong is not None:
        raise wrong
    return args.accuracy or accuracy_name(names)


def _prompt_order(rows: Any, args: GRPOConfig, plan: Plan) -> PromptOrder:
    """The order in which training rows are drawn."""
    return PromptOrder(
        rows,
        plan,
        shuffle=args.shuffle_dataset,
        seed=args.seed if args.data_seed is None else args.data_seed,
        max_steps=args.max_steps,
        balance=args.balance_column,
    )


def with_rows(run: TrainingRun, rows: Any) -> TrainingRun:
    """The run with other training rows, checked as the first ones were."""
    given = Arguments(model=run.policy.source, train_dataset=rows, rollout_func=run.agents.rollout_func)
    builder = run.rows.builder
    train, _ = _checked_data(
        run.args, given, builder, run.scoring.rewards, run.plan, run.agents.pools, run.agents.program
    )
    order = _prompt_order(train, run.args, run.plan)
    return replace(run, rows=replace(run.rows, train=train, order=order))


def reward_records(
    reward_funcs: Any,
    tokenizers: Any,
    args: GRPOConfig | None,
    pools: EnvironmentPools | None = None,
    program: Program | None = None,
) -> tuple[tuple[Reward, ...], int]:
    """`reward_funcs` resolved, and after them the environments' own, or a program's, with their number.

    Reward models are on the CPU where there are no settings.
    """
    functions = as_list(reward_funcs)
    own = pools.reward_functions() if pools else []
    if program is not None:
        failed = None if args is None else on_error(args.on_reward_error)
        capped = None if functions else 0.0  # functions of the recipe judge what was drawn
        own = [program_reward(failed=None if isinstance(failed, str) else failed, capped=capped)]
    if named := next((function for function in functions if isinstance(function, str) and function in LIBRARY), None):
        raise ConfigError(
            f"reward_funcs: `{named}` is a function of the library; a text is the name of a reward model.",
            code="W013",
            fix=f"from podium.rewards import {named}; reward_funcs={named}",
            settings=("reward_funcs",),
            named=named,
        )
    tokenizers = [*as_list(tokenizers), *[None] * len(own)] if tokenizers is not None else None
    settings: dict[str, Any] = {"device": "cpu"}
    if args is not None:
        settings = {
            "model_init_kwargs": args.model_init_kwargs,
            "trust_remote_code": args.trust_remote_code,
            "chat_template_kwargs": args.chat_template_kwargs,
            "device": args.device,
        }
    return resolve_rewards([*functions, *own], tokenizers, **settings), len(own)


def environment_pools(factory: Any) -> EnvironmentPools | None:
    """The pools of a trainer's `environment_factory`, each of whose factories is called once."""
    if factory is None or isinstance(factory, EnvironmentPools):
        return factory
    return EnvironmentPools(factory)


def agents_of(
    given: Arguments,
    pools: EnvironmentPools | None,
    args: GRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    program: Program | None = None,
    *,
    images: ImageProcessor | None = None,
) -> Agents:
    """The tools, environments and `rollout_func` of a trainer. The tokenizer is given the templates that it lacks;
    `images`: reads those that tools, environments and programs give."""
    if args.turn_discount is not None and (given.rollout_func is not None or pools is None or not pools.sums_steps):
        raise ConfigError(
            "turn_discount needs rewards of steps: a `podium.TextEnvironment` without a `get_reward` of its own.",
            fix="leave turn_discount out: every turn has the advantage of its completion",
            settings=("turn_discount",),
        )
    own = [tool.name for name in pools.factories for tool in pools.tools(name)] if pools else []
    tools = distinct(resolve_tools(as_list(given.tools)), taken=own)
    needs_tools = bool(tools) or (pools is not None and pools.has_tools)
    kwargs = args.chat_template_kwargs or {}
    if args.observation_coef and not (tools or pools or program or given.rollout_func):
        raise ConfigError(
            f"observation_coef is {args.observation_coef:g}, and here nothing but the policy writes into a "
            "completion: there are no tools, no environment, no agent and no rollout_func.",
            code="C030",
            fix="Leave observation_coef out, or name tools, an environment or an agent.",
            settings=("observation_coef",),
            args=args,
        )
    chat = tool_format(tokenizer, kwargs, needs_tools=needs_tools)
    if program is not None:
        with contextlib.suppress(ConfigError):  # a program may do without; a request with tools is then refused
            chat = tool_format(tokenizer, kwargs, needs_tools=True)
    if images is not None:
        # The processor renders images, and its own template may know no tools.
        template = chat.chat_template or (tokenizer.chat_template if chat.parses else None)
        chat = replace(chat, images=images, chat_template=template)
    return Agents(
        chat=chat,
        program=program,
        program_timeout=args.agent_timeout or None,
        tools=tools,
        pools=pools,
        rollout_func=given.rollout_func,
        call_limits=replace(call_limits(args, tokenizer), reads_images=images is not None),
        max_iterations=args.max_tool_calling_iterations,
        max_turns=args.max_turns,
        max_corrections=args.max_call_corrections,
    )


def _say_idle_workers(args: GRPOConfig, rewards: tuple[Reward, ...]) -> None:
    if args.reward_workers > 1 and not any(getattr(reward.function, "row_wise", False) for reward in rewards):
        logger.warning(
            "reward_workers=%d does nothing: no reward here is a function in a file that says `row_wise`.",
            args.reward_workers,
        )


def load_settings(args: GRPOConfig, quantization_config: Any, peft_config: Any) -> loading.LoadSettings:
    """Settings of loading a model."""
    return loading.LoadSettings(
        init_kwargs=dict(args.model_init_kwargs or {}),
        trust_remote_code=args.trust_remote_code,
        quantization_config=quantization_config,
        peft_config=peft_config,
        needs_reference=bool(args.beta),
        gradient_checkpointing=bool(args.gradient_checkpointing),
        disable_dropout=args.disable_dropout,
        cast_head_to_fp32=args.cast_lm_head_to_fp32,
        frozen_parameters=args.frozen_parameters,
        train_image_encoder=args.train_image_encoder,
        ignored=ignored_codes(args),
        frozen_dtype=half_dtype(args) or torch.float32,
        device=args.device if args.device.type == "cuda" and not divides_weights(args) else None,
    )


def plan_of(args: GRPOConfig) -> Plan:
    """TRL's batch arithmetic."""
    return Plan(
        prompts_per_round=args.generation_batch_size // args.num_generations,
        num_generations=args.num_generations,
        shares=args.steps_per_generation,
        iterations=args.num_iterations,
        accumulation=args.gradient_accumulation_steps,
        ranks=args.world_size,
        rank=args.process_index,
    )


def prompt_builder(
    args: GRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    agents: Agents | None = None,
    *,
    room: int | None = None,
) -> PromptBuilder:
    """Rows -> prompts, with the tools of all. `room`: tokens that the sampler takes, if fewer than the context.

    A program writes its prompts by itself: no limit holds for what is in its row.
    """
    context = loading.context_length(config)
    is_free = agents is not None and agents.program is not None
    return PromptBuilder(
        tokenizer=tokenizer,
        chat_template_kwargs=(args.chat_template_kwargs or {}) if agents is None else agents.chat.template_kwargs,
        tools=() if agents is None else agents.common_schemas,
        template=None if agents is None else agents.chat.chat_template,
        max_prompt_length=None if is_free else args.max_prompt_length,
        overlong=args.overlong_prompts,
        context_length=None if is_free else min((n for n in (context, room) if n is not None), default=None),
        max_completion_length=args.max_completion_length,
        vocabulary=getattr(config.get_text_config(), "vocab_size", None),
        images=None if agents is None else agents.chat.images,
    )


def _checked_data(
    args: GRPOConfig,
    given: Arguments,
    builder: PromptBuilder,
    rewards: tuple[Reward, ...],
    plan: Plan,
    pools: EnvironmentPools | None,
    program: Program | None,
) -> tuple[Any, Any]:
    """The datasets, checked; with the columns and rows that the arguments leave in them."""
    train = given.train_dataset
    evaluation = given.eval_dataset
    if train is None:
        if pools is None:
            raise DataError(
                "`train_dataset` is required unless an `environment_factory` is provided.",
                fix="Pass rows with a `prompt`, as a datasets.Dataset or a list of dicts; or an environment that "
                "makes them.",
            )
        train = placeholder_rows(pools, num_prompts=plan.prompts_per_round, max_steps=args.max_steps)

    def checked(dataset: Any, name: str, num_needed: int | None = None) -> Any:
        if dataset is None:
            return None
        if pools is not None and not isinstance(dataset, CheckedRows) and not has_prompts(dataset):
            return _rows_without_prompts(dataset, name, num_needed)
        found = checked_rows(dataset, name, num_needed=num_needed, builder=builder, may_lack_prompt=pools is not None)
        dataset = undecoded(found.rows)
        found = replace(found, rows=dataset)
        columns = getattr(dataset, "column_names", None) or (list(dataset[0]) if hasattr(dataset, "__len__") else None)
        if columns is not None and given.rollout_func is None:  # which may add columns
            columns = [x for x in columns if x in KEPT] if args.remove_unused_columns else columns
            check_rewards(rewards, columns, environments=pools is not None or program is not None)
            check_program(program, columns)
        fitting = found.without_too_long(builder)
        if not args.remove_unused_columns:
            return fitting
        if hasattr(fitting, "select_columns"):
            return fitting.select_columns([name for name in columns or ["prompt"] if name in KEPT])
        return [{name: value for name, value in row.items() if name in KEPT} for row in fitting]

    train = checked(train, "train_dataset", plan.prompts_per_round)
    evaluation = (
        {k: checked(v, f"eval_dataset[{k!r}]") for k, v in evaluation.items()}
        if isinstance(evaluation, Mapping)
        else checked(evaluation, "eval_dataset")
    )
    _set_for_streams(args, train, evaluation)
    prompts = [] if is_read_once(train) else [row.get("prompt") for row in islice(train, 4)]
    written = [prompt for prompt in prompts if prompt is not None]
    check_reward_models(rewards, written, args.max_completion_length)
    return train, evaluation


def _set_for_streams(args: GRPOConfig, train: Any, evaluation: Any) -> None:
    """Set accelerate and the dataloaders for streams as TRL does. Raises `ConfigError` for what a stream cannot give.

    Podium reads a stream itself, in order; the settings are for code that reads the arguments, or gets a dataloader.
    """
    others = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    if not any(dataset is not None and is_stream(dataset) for dataset in (train, *others)):
        return
    facts = Facts(settings=args, stream="train" if is_stream(train) else "evaluation")
    for problem in findings(STREAMS, facts):
        raise ConfigError(f"{problem.what}.", code=problem.code, fix=problem.fix, what=problem.what)
    args.accelerator_config.dispatch_batches = False
    if is_stream(train) and args.dataloader_num_workers:
        logger.warning(
            "Iterable datasets require `dataloader_num_workers=0`; the %d that were set are left out.",
            args.dataloader_num_workers,
        )
        args.dataloader_num_workers = 0


def check_program(program: Program | None, columns: Sequence[str]) -> None:
    """Raise `ConfigError` for an argument of a program that is neither a column nor given to all."""
    given = (*GIVEN, *columns)
    missing = [] if program is None else [name for name in program.needs if name not in given]
    if program is not None and missing:
        raise ConfigError(
            f"{program.name} asks for `{missing[0]}`, which is neither a column nor given to every agent: "
            f"{listed(given)}.",
            code="C065",
            fix="give it a default, or name a column",
            settings=("agent",),
            name=program.name,
            argument=missing[0],
            given=given,
        )


def has_prompts(dataset: Any) -> bool:
    """Whether rows have a `prompt` that can be checked; where they have none, or an empty one, environments make it."""
    first: Mapping[str, Any] = {} if is_read_once(dataset) else next(iter(dataset), {})
    problem = None if is_read_once(dataset) else check_row({"prompt": None, **first}, 0)
    return problem is None or problem.code not in UNWRITTEN


def _rows_without_prompts(dataset: Any, name: str, num_needed: int | None) -> Any:
    """Rows whose prompts environments make; only their number is known before."""
    if hasattr(dataset, "__len__") and len(dataset) < (num_needed or 1):
        what = f"{name} has {len(dataset)} rows, but one generation round takes {num_needed or 1}."
        raise DataError(what, code="D023", fix="add rows, or lower generation_batch_size")
    return dataset


# ---- with weights ----


def load_run(prepared: Prepared) -> TrainingRun:
    """Load the policy, decide how it computes, and build what samples from it."""
    args = prepared.args
    load = prepared.load
    prepare_to_load(args, adapter=load.peft_config is not None or isinstance(prepared.source, PeftModel))
    load_reward_models(prepared.scoring.rewards)
    example = prompt_with_images(prepared.rows.builder, prepared.rows.train)
    served = prepared.served
    if example is not None and served is not None:
        served = served.with_images(example)
    if example is None and (prepared.agents.takes_turns or is_read_once(prepared.rows.train)):
        example = drawn_prompt(prepared.rows.builder)
        if example is not None and served is not None:
            with contextlib.suppress(ConfigError):  # it may do without: refused where images come
                served = served.with_images(example)
    step = load_step(prepared.source, args, load, prepared.config, prepared.tokenizer, served=served, example=example)
    loss = loss_settings(args)
    router_coef = _router_coef(args, step.model)
    objective = Objective(
        loss=loss,
        router_coef=router_coef,
        skips_zero_advantage=skips_zero_advantage(
            loss,
            entropy_coef_possible=bool(args.entropy_coef) or args.use_adaptive_entropy,
            top_entropy_quantile=args.top_entropy_quantile,
            moe=bool(router_coef),
        ),
        reference=Reference(step.model) if args.beta else None,
        teacher=load_teacher(args, prepared.teacher, step.policy.forward, load, example)
        if args.teacher_model
        else None,
    )
    return TrainingRun(
        args=args,
        step=step,
        agents=prepared.agents,
        rows=prepared.rows,
        scoring=prepared.scoring,
        objective=objective,
    )


def prompt_with_images(builder: PromptBuilder, rows: Any) -> Prompt | None:
    """The prompt of the first row with images; None: there is none."""
    if builder.images is None or is_read_once(rows):
        return None
    found = next((row for row in islice(rows, SEARCHED_ROWS) if has_images(row)), None)
    return None if found is None else builder(found, id=0, row_index=-1)


def drawn_prompt(builder: PromptBuilder) -> Prompt | None:
    """A prompt with a grey square, to try a model with where images may come later; None: it reads none."""
    if builder.images is None:
        return None
    from PIL import Image

    block = {"type": "image", "image": Image.new("RGB", (32, 32), "grey")}
    with contextlib.suppress(DataError):
        return builder({"prompt": [{"role": "user", "content": [block]}]}, id=0, row_index=-1)
    return None


def load_step(
    source: Any,
    args: GRPOConfig,
    load: loading.LoadSettings,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    served: Connection | None = None,
    example: Prompt | None = None,
) -> Step:
    """Load the policy, learn how it computes, and build the engine that samples from it.

    `example`: a prompt with images, if there are some.
    """
    set_seed(args.seed)  # a new adapter is random
    model = loading.load_policy(source, load)
    loading.align_pad_token(model, tokenizer)
    if not divides_weights(args) and not getattr(model, "hf_device_map", None):
        model.to(args.device)  # the one that trains: there it is tried, and evaluated before training
    with whole_at_load(model, args):
        forward = _forward(args, model, example)
    tokens_per_pack = _tokens_per_pack(config, args, forward.precision, model)
    _decide_checkpointing(args, tokens_per_pack, forward.path)
    inputs = EngineInputs(
        policy=model,
        tokenizer=tokenizer,
        forward=forward,
        tokens_per_pack=tokens_per_pack,
        copy_on=torch.device(args.rollout_device or args.device) if args.async_rollouts else None,
        served=served,
        vllm=vllm_settings(args),
        agree=broadcast_from_main,
    )
    policy = Policy(
        source=source,
        model=model,
        tokenizer=tokenizer,
        forward=forward,
        tokens_per_pack=tokens_per_pack,
        end_ids=loading.end_ids(model, tokenizer),
        trained=loading.should_train(model, load, by_name=isinstance(source, str)),
        num_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        tried_images=() if example is None else example.images,
    )
    return Step(args, policy, _engine(inputs, "vllm" if args.use_vllm else args.rollout_engine, args))


def load_alone(given: Arguments) -> tuple[Step, PromptBuilder]:
    """A step without a run around it, in one process, and the builder of its prompts.

    Raises:
        ConfigError, ModelError: as `GRPOTrainer`.
    """
    args = given.args
    assert args is not None
    fit_threads()
    load = load_settings(args, given.quantization_config, given.peft_config)
    adapter = load.peft_config is not None or isinstance(given.model, PeftModel)
    _refuse_wrong(args, adapter=adapter, evaluates=False)
    config, tokenizer, served = _without_weights(given, args, load)
    builder = prompt_builder(args, tokenizer, config, room=None if served is None else served.longest)
    prepare_to_load(args, adapter=adapter)
    step = load_step(given.model, args, load, config, tokenizer, served=served)
    step.divided(Processes(Accelerator(), step.touch), step.model)
    accelerate_seed(args.seed, device_specific=True)
    return step, replace(builder, name="prompts")


def _forward(args: GRPOConfig, policy: nn.Module, example: Prompt | None = None) -> Forward:
    """How the policy computes log-probabilities, learnt on its own forward, with an example of images if given."""
    path, head, not_shared = broadcast_from_main(choose_method(policy, example))
    if not_shared:
        logger.warning(
            "Shared prefixes are off for this model: %s. Prompts are computed once per completion.", not_shared
        )
    if isinstance(head, OwnLogits):
        logger.warning(
            "Log-probabilities come from the model's own logits, which takes more memory: %s. If it runs out, lower "
            "tokens_per_pack.",
            head.why,
        )
    return Forward(path=path, head=head, temperature=args.temperature, precision=_precision(args, policy))


def _precision(args: GRPOConfig, policy: nn.Module) -> Precision:
    """A context in which sampling, scoring and training compute the same."""
    if not kind_of(args.device).autocast:
        if zero_stage(args) == 3:  # whose weights are there only while their own layer is called
            return contextlib.nullcontext
        enabled = broadcast_from_main(rounds_products(args.product_precision))
        if args.product_precision == "auto" and args.bf16_asked and not enabled:
            logger.warning(
                "bf16: true, but bfloat16 does not pay on this processor: %s. Matrix products stay in float32. "
                "To round them all the same, set product_precision: bfloat16.",
                measured_products(),
            )
        elif args.product_precision == "auto":
            logger.info("Matrix products in %s: %s.", "bfloat16" if enabled else "float32", measured_products())
        with evaluation_mode(policy):
            return lean_precision(policy, enabled=enabled)
    dtype = half_dtype(args)
    return contextlib.nullcontext if dtype is None else lambda: torch.autocast(args.device.type, dtype=dtype)


def _tokens_per_pack(config: PretrainedConfig, args: GRPOConfig, precision: Precision, policy: nn.Module) -> int:
    if args.tokens_per_pack:
        return args.tokens_per_pack
    rounded = precision.enabled if isinstance(precision, ProductPrecision) else None
    half = half_dtype(args) is not None
    return fitting_tokens_per_pack(policy, config, args.device, half=half, rounded=rounded, copies=bool(args.beta))


def _decide_checkpointing(args: GRPOConfig, tokens_per_pack: int, path: AttentionPath) -> None:
    """Unless the user decided: recompute activations only where a single rollout may not fit into a pack."""
    if args.gradient_checkpointing is None:
        longest = args.max_completion_length + (args.max_prompt_length or 0)
        args.gradient_checkpointing = path == "padded" or needs_checkpointing(longest, tokens_per_pack)
        if hasattr(args, "activation_checkpointing"):  # what transformers 5.23 reads
            args.activation_checkpointing = args.gradient_checkpointing
    if args.gradient_checkpointing and kind_of(args.device).host_memory:
        return_large_blocks()


def _router_coef(args: GRPOConfig, policy: nn.Module) -> float:
    has_router = loading.is_mixture_of_experts(policy)
    if error := no_router(args, policy.config, known=has_router):
        raise error
    if not has_router:
        return 0.0
    if args.router_aux_loss_coef is not None:
        return args.router_aux_loss_coef
    return getattr(policy.config.get_text_config(), "router_aux_loss_coef", 0.0) or 0.0


def _engine(inputs: EngineInputs, asked: str, args: GRPOConfig) -> RolloutEngine:
    """The engine that `rollout_engine` asks for; see `engines.table`."""
    overlaps = inputs.copy_on is not None
    name, reasons = choose(asked, inputs.forward.path, only_generate(args), overlaps=overlaps)
    if reasons:
        logger.warning("Sampling with transformers' generate, which is slower: %s.", "; ".join(reasons))
    return ENGINES[name].build(inputs)


def engine_for(
    args: GRPOConfig,
    config: PretrainedConfig,
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    example: Prompt | None = None,
) -> RolloutEngine:
    """The engine with which a run of these arguments samples, but for vLLM, for a policy that is not trained.

    `example`: a prompt with images, if there are some.
    """
    forward = _forward(args, policy, example)
    tokens = _tokens_per_pack(config, args, forward.precision, policy)
    inputs = EngineInputs(policy=policy, tokenizer=tokenizer, forward=forward, tokens_per_pack=tokens)
    return _engine(inputs, "auto" if args.rollout_engine == "vllm" else args.rollout_engine, args)
