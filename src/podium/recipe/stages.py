"""`stages:` of a recipe: every stage becomes a recipe of its own, the keys beside `stages` with its own over them.

All of it is resolved before anything starts. A flag wins over both.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from podium.errors import ConfigError, Finding
from podium.errors.texts import as_line, did_you_mean
from podium.recipe.assume import SPELLINGS
from podium.recipe.document import Document, Place, Reader, from_here, in_order, mistake
from podium.recipe.gates import Gate, parse_gate, unknown_metric
from podium.recipe.reading import survey_recipe
from podium.recipe.recipe import Kind, Recipe, Stage
from podium.recipe.schema import OWN_KEYS, check_type, key_types, unknown_key
from podium.rewards.resolve import callable_name, distinct_names
from podium.trainer.fields import arguments

STAGES = "stages"

STAGE_KEYS: Mapping[str, Any] = {
    "name": str,
    "type": Kind,
    "until": str | None,
    "epochs": float | None,
    "optimizer": Literal["keep", "reset"],
    "reference": Literal["keep", "last_stage"],
    "schedule": Literal["continue", "restart"],
    "adaptive_weights": Literal["keep", "reset"],
    "completion": str | None,
}
"""Keys of a stage besides those of a recipe."""

CARRIED = {"optimizer": "keep", "reference": "keep", "schedule": "restart", "adaptive_weights": "keep"}
"""Defaults of what a stage takes over from the one before it."""

CARRIED_FROM_SFT = {**CARRIED, "optimizer": "reset", "reference": "last_stage"}
"""The same after a stage of another loss: its result is the start of the policy and of the reference."""

SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
"""Settings that a schedule which goes on cannot change."""

_OF_COLUMNS = ("prompt", "answer", "answer_from", "examples", "columns")
_OF_ROWS = ("dataset_config", "filter", *_OF_COLUMNS, "pass_rates", "pass_rate", "order", "difficulty")
"""Keys about the rows of one dataset, which do not apply to another's."""

_OF_AGENTS = ("tools", "environment", "agent")
_PER_STAGE = {"dataset", "eval_dataset", "rewards", "datasets", "held_out", "system", "chat", *_OF_ROWS, *_OF_AGENTS}
_LOADING = ("model_init_kwargs", "trust_remote_code", "disable_dropout", "cast_lm_head_to_fp32", "chat_template_path")
_WHOLE_RUN = frozenset({*OWN_KEYS, *_LOADING, "output_dir", "resume_from_checkpoint", "push_to_hub"})
"""Keys that make no sense for a part of a run; `trl.ModelConfig`'s are others."""

REFUSED: Mapping[str, str] = {
    "save_only_model": "leaves out what the next stage, or a run that is resumed, goes on from",
    "load_best_model_at_end": "would hand on other weights than those at a stage's end",
    "push_to_hub": "would publish every stage by itself; the run's folder can be when it is done",
}
"""Settings that do not go together with stages."""

_REPLACES: Mapping[str, tuple[str, ...]] = {
    "rewards": ("reward_weights", "adaptive_rewards", "reward_model_name_or_path"),
    "dataset": ("datasets", *_OF_ROWS),
    "datasets": ("dataset", *_OF_ROWS),
    "eval_dataset": ("held_out",),
    "held_out": ("eval_dataset",),
    "epochs": ("max_steps", "num_train_epochs"),
}
"""Keys of the base that no longer apply once a stage has these."""

_NOT_FOR_SFT = ("eval_", "load_best", "metric_for", "greater_is", "remove_unused", "batch_eval", "label_names", "hub_")
"""Beginnings of keys that the base has for evaluation by rewards, and for the whole run."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(slots=True, kw_only=True)
class Surveyed:
    """A recipe, or a stage of one, as far as it can be understood, and the problems in it."""

    recipe: Recipe
    problems: Sequence[Finding] = ()
    stage: Stage | None = None
    """None: the recipe has no stages."""


def survey(document: Document, overrides: Mapping[str, Any]) -> list[Surveyed]:
    """A recipe, or each of its stages, with everything that is wrong with it. `ConfigError` as `survey_stages`."""
    if STAGES in document.values:
        return survey_stages(document, overrides)
    recipe, problems = survey_recipe(document, overrides)
    return [Surveyed(recipe=recipe, problems=problems)]


def whole(document: Document, overrides: Mapping[str, Any], surveyed: Sequence[Surveyed]) -> Recipe:
    """The recipe of the run. One with stages is judged as its last stage is; `stages` are its parts."""
    last = surveyed[-1].recipe
    stages = tuple(part.stage for part in surveyed if part.stage is not None)
    if not stages:
        return last
    folder = str(Path(last.config["output_dir"]).parent)
    given = {**from_here(document.values, document.folder), **overrides}
    return replace(last, config={**last.config, "output_dir": folder}, given=given, stages=stages)


def labelled(surveyed: Sequence[Surveyed]) -> list[Finding]:
    """All problems with the stage they are in; those of every stage once, without a stage."""
    return in_order(by_stage(surveyed, [part.problems for part in surveyed]))


def by_stage(surveyed: Sequence[Surveyed], listed: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Problems or findings of every stage, with its name; those of every stage once, without a name."""
    if surveyed[0].stage is None:
        return list(listed[0])

    def words(finding: Finding) -> tuple[str, ...]:
        return (finding.code, finding.where, finding.what, finding.fix)

    shared: set[tuple[str, ...]] = set()
    if len(listed) > 1:
        shared = set.intersection(*({words(finding) for finding in found} for found in listed))
    own = [
        replace(finding, what=f"stage {part.stage.name}: {finding.what}")
        for part, found in zip(surveyed, listed, strict=True)
        for finding in found
        if part.stage is not None and words(finding) not in shared
    ]
    return [*(finding for finding in listed[0] if words(finding) in shared), *own]


def survey_stages(document: Document, overrides: Mapping[str, Any]) -> list[Surveyed]:
    """Every stage with the problems in it. Raises `ConfigError` where `stages` is no list of mappings."""
    written = document.values[STAGES]
    if not isinstance(written, list) or not written or not all(isinstance(stage, Mapping) for stage in written):
        raise ConfigError(
            "`stages` must be a list of mappings, each with a `name`",
            code="C003",
            where=document.where((STAGES,)),
            fix="stages: [{name: format, rewards: [answer_format], max_steps: 20}]",
        )
    found: list[Surveyed] = []
    for index, values in enumerate(written):
        reader = _StageReader(document=document, overrides=overrides, index=index, values=values)
        found.append(reader.survey(found[-1].stage if found else None))
    return found


@dataclass(slots=True, kw_only=True)
class _StageReader(Reader):
    """Reads one stage."""

    document: Document
    overrides: Mapping[str, Any]
    index: int
    values: Mapping[str, Any]

    def where(self, place: Place) -> str:
        """The line of a value of the stage."""
        return self.document.where((STAGES, self.index, *place))

    def survey(self, before: Stage | None) -> Surveyed:
        own = {key: self._checked(key, STAGE_KEYS[key]) for key in STAGE_KEYS if self.values.get(key) is not None}
        kind: Kind = own.get("type") or "grpo"
        settings = {key: value for key, value in self.values.items() if key not in STAGE_KEYS}
        self._check_name()
        self._check_keys(settings, kind)
        if own.get("epochs") is not None:
            settings["num_train_epochs"] = own["epochs"]
            if "max_steps" in settings:
                self.refuse(ConfigError("`epochs` and `max_steps` are two ends", fix="keep one"), "epochs")
        recipe = self._recipe(settings, kind)
        name = str(own.get("name") or f"stage-{self.index + 1}")
        folder = str(Path(recipe.config["output_dir"]) / f"{self.index + 1:02}-{name}")
        recipe = replace(recipe, config={**recipe.config, "output_dir": folder})
        defaults = CARRIED_FROM_SFT if before is not None and before.kind == "sft" else CARRIED
        carried: dict[str, Any] = {key: own.get(key) or default for key, default in defaults.items()}
        stage = Stage(
            number=self.index + 1,
            name=name,
            kind=kind,
            recipe=recipe,
            until=self._gate(own.get("until"), recipe, kind, bounded="epochs" in own),
            completion=own.get("completion"),
            **carried,
        )
        self._check_place(own, stage, before)
        return Surveyed(recipe=recipe, problems=in_order(self.problems), stage=stage)

    @property
    def _is_last(self) -> bool:
        return self.index == len(self.document.values[STAGES]) - 1

    def _checked(self, key: str, annotation: Any) -> Any:
        checked, error = check_type(key, self.values[key], annotation)
        if error is not None:
            self.refuse(error, key)
        return checked if error is None else None

    def _check_name(self) -> None:
        name = self.values.get("name")
        names = [stage.get("name") for stage in self.document.values[STAGES][: self.index]]
        what = ""
        if name is None:
            what = "a stage needs a `name`, which is also that of its folder"
        elif not isinstance(name, str) or not _NAME.fullmatch(name):
            what = f"`name` must be made of letters, digits, - and _; got `{name}`"
        elif name in names:
            what = f"the name `{name}` is that of stage {names.index(name) + 1}, too"
        if what:
            code = "C031" if name is None else "C003"
            self.refuse(ConfigError(what, code=code, fix=f"name: stage-{self.index + 1}"), "name")

    def _check_keys(self, settings: dict[str, Any], kind: Kind) -> None:
        """Names; what cannot be in a stage is taken out of `settings`."""
        for key in list(settings):
            short = SPELLINGS.get(key, key)
            if key not in key_types() and not (kind == "sft" and key in sft_only()):
                known = ChainMap({**STAGE_KEYS}, key_types())  # type: ignore[arg-type]  # only read
                error = unknown_key(key, None if not did_you_mean(key, STAGE_KEYS) else known, value=settings[key])
                error.changes = {}  # they would be beside `stages`
                self.refuse(error, key)
            elif short in whole_run():
                same = ConfigError(f"`{key}` is the same for the whole run", fix="write it beside `stages`")
                self.refuse(same, key)
            elif kind == "sft" and key not in sft_keys():
                what = f"`{key}` says nothing to an sft stage, which samples no completions"
                self.refuse(ConfigError(what, fix="leave it out"), key)
            else:
                continue
            del settings[key]

    def _recipe(self, settings: Mapping[str, Any], kind: Kind) -> Recipe:
        plain = {key: value for key, value in settings.items() if kind == "grpo" or key not in sft_only()}
        document = self._merged(plain)
        recipe, problems = survey_recipe(document, self.overrides, needs_rewards=kind == "grpo", assumes=False)
        self.problems += problems
        for key, why in REFUSED.items():
            if recipe.config.get(key):
                where = recipe.places.get(key, recipe.name)
                self.problems.append(mistake(where, ConfigError(f"`{key}` {why}", fix=as_line(key, None))))
        return recipe if kind == "grpo" else self._for_sft(recipe, settings)

    def _for_sft(self, recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
        inherited = arguments("TrainingArguments")
        config = {
            key: value
            for key, value in recipe.config.items()
            if key in inherited and not key.startswith(_NOT_FOR_SFT) and key != "gradient_checkpointing"
        }
        if recipe.data.order is not None:
            config["train_sampling_strategy"] = "sequential"
        config |= {key: self._checked(key, sft_only()[key]) for key in settings if key in sft_only()}
        return replace(recipe, config={"logging_steps": 1, **config}, rewards=())

    def _merged(self, settings: Mapping[str, Any]) -> Document:
        """The base with the stage's settings over it, and the line of every key."""
        gone = {STAGES, *(SPELLINGS.get(key, key) for key in settings)}
        for key in (*settings, *({"epochs"} & self.values.keys())):
            gone |= set(_REPLACES.get(SPELLINGS.get(key, key), ()))
        if not self._is_last:
            gone.add("accuracy")  # of the run as a whole: the rewards of its last stage
        base = {key: x for key, x in self.document.values.items() if SPELLINGS.get(key, key) not in gone}
        lines = {place: line for place, line in self.document.lines.items() if place[0] in base}
        lines |= {
            place[2:]: line
            for place, line in self.document.lines.items()
            if place[:2] == (STAGES, self.index) and len(place) > 2 and place[2] in settings
        }
        if "num_train_epochs" in settings and "epochs" in self.values:
            lines[("num_train_epochs",)] = self.document.lines.get((STAGES, self.index, "epochs"), 0)
        return replace(self.document, values={**base, **settings}, lines=lines)

    def _gate(self, text: str | None, recipe: Recipe, kind: Kind, *, bounded: bool) -> Gate | None:
        if text is None:
            return None
        try:
            gate = parse_gate(text)
        except ConfigError as error:
            self.refuse(error, "until")
            return None
        config = recipe.config
        found = list[tuple[str, str]]()
        if not bounded and not (isinstance(config.get("max_steps"), int) and config["max_steps"] > 0):
            found.append(("a gate may never be met: the stage needs `max_steps`, too", "max_steps: 50"))
        if config.get("record") is False:
            found.append(("a gate reads what is recorded, and `record` is false", "record: true"))
        names = distinct_names([callable_name(spec.function) for spec in recipe.rewards])
        if kind != "sft" and names and (unknown := unknown_metric(gate, names)):
            found.append(unknown)
        if kind != "sft" and gate.held_out and str(config.get("eval_strategy", "no")) == "no":
            what = f"`{gate.metric}` is measured by evaluations during training, and there are none"
            found.append((what, "eval_strategy: steps, and eval_steps"))
        for what, fix in found:
            self.refuse(ConfigError(what, code="C060", fix=fix), "until")
        return gate

    def _check_place(self, own: Mapping[str, Any], stage: Stage, before: Stage | None) -> None:
        if stage.kind == "sft" and before is not None:
            self.refuse(ConfigError("an sft stage must be the first", fix="move it to the front"), "type")
        if stage.kind == "sft" and self._is_last:
            what = "behind an sft stage comes at least one that is not"
            self.refuse(ConfigError(what, fix="add a stage with `rewards`"), "type")
        if stage.completion is not None and stage.kind != "sft":
            what = "`completion` is for a stage of `type: sft`"
            self.refuse(ConfigError(what, fix=as_line("completion", None)), "completion")
        if before is None:
            for key in CARRIED:
                if key in own:
                    what = f"`{key}` says what comes from the stage before; this is the first"
                    self.refuse(ConfigError(what, fix=as_line(key, None)), key)
            return
        if stage.optimizer == "keep" and before.recipe.config.get("optim") != stage.recipe.config.get("optim"):
            self.refuse(ConfigError("`optim` differs from the stage before", fix="optimizer: reset"), "optim")
        if stage.schedule == "continue":
            self._check_schedule(stage, before)

    def _check_schedule(self, stage: Stage, before: Stage) -> None:
        """Stages that share one schedule must agree on it, and have lengths that are known."""
        if before.kind == "sft":
            what = "the schedule of an sft stage does not go on in the next"
            self.refuse(ConfigError(what, fix="schedule: restart"), "schedule")
        differ = [key for key in SCHEDULE if before.recipe.config.get(key) != stage.recipe.config.get(key)]
        if differ:
            what = f"`schedule: continue` goes on with that of the stage before, but {', '.join(differ)} differ"
            self.refuse(ConfigError(what, fix="take them out, or schedule: restart"), "schedule")
        endless = [part.name for part in (before, stage) if part.max_steps is None]
        if endless:
            what = f"`schedule: continue` must know how long the stages are: {' and '.join(endless)} need `max_steps`"
            self.refuse(ConfigError(what, fix="max_steps: 50"), "schedule")


def schedule_steps(stages: Sequence[Stage], index: int) -> int | None:
    """Length of the schedule that stage `index` is part of, the bounds of all its stages; None: the stage alone."""
    first = index
    end = index + 1
    while first > 0 and stages[first].schedule == "continue":
        first -= 1
    while end < len(stages) and stages[end].schedule == "continue":
        end += 1
    return None if end - first == 1 else sum(stage.max_steps or 0 for stage in stages[first:end])


def reference_start(stages: Sequence[Stage], index: int) -> int:
    """The stage whose beginning is the reference policy of stage `index`."""
    while index > 0 and stages[index].reference == "keep":
        index -= 1
    return index


@cache
def whole_run() -> frozenset[str]:
    """Keys that a stage cannot have, by their short names."""
    keys = {*_WHOLE_RUN, *arguments("ModelConfig")} - _PER_STAGE
    return frozenset({SPELLINGS.get(key, key) for key in keys} - _PER_STAGE)


@cache
def sft_only() -> Mapping[str, Any]:
    """Keys that only `SFTConfig` has, or that mean something else there."""
    common = arguments("TrainingArguments")
    return {key: value for key, value in arguments("SFTConfig").items() if key not in common}


@cache
def sft_keys() -> frozenset[str]:
    """Keys of a recipe that an SFT stage may have."""
    data = {"dataset", "dataset_name", "dataset_train_split", "dataset_streaming", "datasets", "streaming", *_OF_ROWS}
    common = {key for key in arguments("TrainingArguments") if not key.startswith(_NOT_FOR_SFT)}
    return frozenset({*common, *sft_only(), *data, "held_out", "system", "chat"})
