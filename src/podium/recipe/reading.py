"""A YAML document and flags, checked key by key, become a `Recipe`; all problems are collected."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.data.columns import Columns
from podium.data.rows import CONTRADICTIONS, DatasetSpec, DataSpec, first_rows, read_parts
from podium.data.selection import LOOKED_AT, Condition, parse_condition, worked_examples
from podium.data.sources import check_exists
from podium.errors import ConfigError, DataError, Finding, PodiumError
from podium.errors.rule import Facts, Rule, findings
from podium.errors.texts import as_line, as_lines
from podium.isolation.user_files import IN_FILE, find_file
from podium.models.builtin import BUILTIN
from podium.recipe.assume import SPELLINGS, assume
from podium.recipe.document import Document, Place, Reader, from_here, in_order, mistake, variables
from podium.recipe.recipe import AgentSpec, Factory, Recipe
from podium.recipe.rewards import RewardReader, RewardSpec
from podium.recipe.schema import (
    PART_TYPES,
    check_key,
    check_type,
    check_value,
    config_keys,
    key_types,
    meant,
    of_flag,
    unknown_key,
)
from podium.rewards.resolve import callable_name, distinct_names
from podium.runs.checkpoint import resolve_auto
from podium.runs.redaction import HIDDEN
from podium.trainer.fields import arguments
from podium.trainer.rules import members, unknown_accuracy

if TYPE_CHECKING:
    from podium.agents.setup import Program
    from podium.agents.tools import Tool

# ---- keys that exclude each other, or need another one ----

FLAT_ADAPTER: Mapping[str, tuple[str, Any]] = {
    "lora_r": ("r", 16),
    "lora_alpha": ("lora_alpha", 32),
    "lora_dropout": ("lora_dropout", 0.05),
    "lora_target_modules": ("target_modules", None),
    "lora_target_parameters": ("target_parameters", None),
    "lora_modules_to_save": ("modules_to_save", None),
    "lora_task_type": ("task_type", "CAUSAL_LM"),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
}
"""TRL's flat keys: the argument of `LoraConfig`, and TRL's default."""


def is_share(bounds: Any) -> bool:
    """Whether a `pass_rate` is two shares, the lower one first."""
    return len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= 1


def _without_use_peft(written: Mapping[str, Any]) -> dict[str, str] | None:
    """The first of TRL's keys of an adapter, where nothing asks for one."""
    flat = [key for key in FLAT_ADAPTER if key in written]
    return {"key": flat[0]} if flat and not {"lora", "use_peft"} & written.keys() else None


def _has_no_examples(written: Mapping[str, Any], data: DataSpec) -> bool:
    """Whether examples are to be taken from the rows of a mixture."""
    number = written.get("examples")
    return isinstance(number, int) and number > 0 and bool(data.parts or data.datasets)


RULES: tuple[Rule, ...] = (
    Rule(
        code="C030",
        needs=("written",),
        when=lambda written: (
            written.get("lora") is not None and (written.get("use_peft") or FLAT_ADAPTER.keys() & written.keys())
        ),
        says=lambda written: "`lora` and TRL's `use_peft`, `lora_*` keys say the same twice",
        cure="keep one way",
        about=("lora",),
    ),
    Rule(
        code="C017",
        needs=("written",),
        when=_without_use_peft,
        says=lambda written, *, key: f"`{key}` does nothing without `use_peft: true`",
        cure=lambda written, *, key: f"add it, or take `{key}` out",
        about=lambda written, *, key: (key,),
    ),
    Rule(
        code="C030",
        needs=("written",),
        when=lambda written: written.get("load_in_4bit") and written.get("load_in_8bit"),
        says=lambda written: "`load_in_4bit` and `load_in_8bit` exclude each other",
        cure="keep one of them",
        about=("load_in_4bit",),
    ),
    Rule(
        code="C030",
        needs=("written",),
        when=lambda written: written.get("load_in_4bit") and written.get("dtype") == "auto",
        says=lambda written: "`dtype: auto` does not say in which precision `load_in_4bit` is to compute",
        cure="dtype: bfloat16, or leave it out: bfloat16 where the GPU has it, else float32",
        about=("dtype",),
    ),
    Rule(
        code="C016",
        needs=("written",),
        when=lambda written: written.get("pass_rate") is not None and not is_share(written["pass_rate"]),
        says=lambda written: f"`pass_rate` must be two shares, the lower one first; got {written['pass_rate']}",
        cure="pass_rate: [0.05, 0.95]",
        about=("pass_rate",),
    ),
    *CONTRADICTIONS,
    Rule(
        code="C003",
        needs=("written", "data"),
        when=_has_no_examples,
        says=lambda written, data: "`examples` is a number, and a mixture has no one form of a row",
        cure="examples: [{...}], written by hand",
        about=("examples",),
    ),
    Rule(
        code="C030",
        needs=("written",),
        when=lambda written: written.get("order") is not None and written.get("shuffle_dataset"),
        says=lambda written: "`order` and `shuffle_dataset: true` exclude each other.",
        cure="Leave one of them out.",
        about=("order",),
    ),
    Rule(
        code="C030",
        needs=("written", "rewards"),
        when=lambda written, rewards: "reward_weights" in written and any(spec.weight is not None for spec in rewards),
        says=lambda written, rewards: "`reward_weights` and `weight` in `rewards` say the same twice",
        cure="keep one",
        about=("reward_weights",),
    ),
    Rule(
        code="C030",
        needs=("written", "rewards"),
        when=lambda written, rewards: written.get("adaptive_rewards") and any(spec.adaptive for spec in rewards),
        says=lambda written, rewards: "`adaptive_rewards` and `adaptive` in `rewards` say the same twice",
        cure="keep one",
        about=("adaptive_rewards",),
    ),
)


# ---- reading ----


def survey_recipe(
    document: Document, overrides: Mapping[str, Any], *, needs_rewards: bool = True, assumes: bool = True
) -> tuple[Recipe, list[Finding]]:
    """The recipe as far as it can be understood, and all problems. Without a model its name is empty.

    `assumes`: whether missing keys may be inferred. Not in a stage: its prompts are to be those of its neighbours.
    """
    assumed = assume({**document.values, **overrides}, alone=not document.is_file) if assumes else {}
    document = replace(document, values={**document.values, **assumed})
    reader = _RecipeReader(document=document, overrides=overrides)
    reader.check_keys()
    values = reader.values
    rewards = reader.rewards()
    agents = reader.agents()
    lora = reader.lora()
    quantization = reader.quantization()
    data = reader.data()
    config = reader.config(rewards)
    for problem in findings(RULES, Facts(written=values, rewards=rewards, data=data)):
        reader.problems.append(replace(problem, where=reader.where(problem.settings[:1])))
    reader.check_needed(rewards, needs_rewards=needs_rewards)
    resume = resolve_auto(Path(str(config["output_dir"])), asked=values.get("resume_from_checkpoint"))
    recipe = Recipe(
        name=document.name,
        model=reader.model(),
        model_settings=reader.model_settings(),
        rewards=rewards,
        config=config,
        resume={"true": True, "false": None, False: None}.get(resume, resume),
        env=variables(document, overrides),
        places={key: reader.where((key,)) for key in values},
        given={
            **from_here(document.values, document.folder),
            **overrides,
            **({"examples": list(reader.taken)} if reader.taken else {}),
        },
        assumed=assumed,
        agents=agents,
        lora=lora,
        quantization=quantization,
        data=data,
    )
    return recipe, in_order(reader.problems)


def _no_path(key: str) -> ConfigError:
    return ConfigError(f"a part of `{key}` needs `path`", fix="path: FILE, or a hub id")


def keys_within(value: Any) -> dict[str, Any]:
    """The keys of a recipe below one that is none, as in `training: {max_steps: 5}` or behind `<<`.

    What another trainer has by the same name is no value of the key here; of two places the outer one counts.

    >>> keys_within({"args": {"max_steps": 5}, "seed": 1, "other": 2}), keys_within(3)
    ({'seed': 1, 'max_steps': 5}, {})
    >>> keys_within({"temperature": 1.0, "val_kwargs": {"temperature": 0.6}, "optim": {"lr": 1e-6}})
    {'temperature': 1.0}
    """
    inside = value if isinstance(value, Mapping) else {}
    found = {key: inner for key, inner in inside.items() if key in key_types() and check_key(key, inner)[1] is None}
    for key, inner in inside.items():
        if key not in key_types():
            found |= {name: value for name, value in keys_within(inner).items() if name not in found}
    return found


@dataclass(slots=True, kw_only=True)
class _RecipeReader(Reader):
    """Collects the values of one recipe that passed."""

    document: Document
    overrides: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    """The name a key was written with."""
    taken: tuple[Mapping[str, Any], ...] = ()
    """Examples that were taken from the rows."""

    def where(self, place: Place) -> str:
        """`run.yaml:4` or `--learning_rate`."""
        key = str(place[0])
        written = self.spelled.get(key, key)
        return f"--{written}" if written in self.overrides else self.document.where((written, *place[1:]))

    def check_keys(self) -> None:
        """Names and types of all keys; the values that pass are in `values` under the short name."""
        self.problems += self.document.problems
        written = {**self.document.values, **self.overrides}
        for key, value in written.items():
            if key not in key_types():
                self._refuse_unknown(key, value, written)
                continue
            if HIDDEN in str(value):
                hidden = ConfigError(
                    f"`{key}` holds {HIDDEN}: what was there was secret when this was written",
                    code="C003",
                    fix=f"write it again, or take `{key}` out",
                )
                self.refuse(hidden, key)
                continue
            if value is None and type(None) not in members(key_types()[key]):
                continue  # `key:` with nothing behind it: as if it were not there
            checked, error = check_key(key, value)
            if error is not None:
                self.refuse(of_flag(error, key, value) if key in self.overrides else error, key)
                if (checked := meant(key, value)) is None:
                    continue  # else the other keys are judged beside what was meant
            short = SPELLINGS.get(key, key)
            if short in self.spelled and self.spelled[short] != key:
                twice = ConfigError(f"`{key}` and `{self.spelled[short]}` mean the same", fix="keep one of them")
                self.refuse(twice, key)
            self.spelled[short] = key
            self.values[short] = checked

    def _refuse_unknown(self, key: str, value: Any, written: Mapping[str, Any]) -> None:
        """Refuse a key that there is not; the other keys are judged beside what it stands for."""
        error = unknown_key(key, value=value, code="C009" if key in self.overrides else "C001")
        stands_for = {new: change for new, change in error.changes.items() if change is not None}
        there = {SPELLINGS.get(name, name) for name in written}
        missing = [new for new in stands_for if SPELLINGS.get(new, new) not in there]
        checked_keys = {new: check_key(new, stands_for[new]) for new in missing}
        fitting = {new: checked for new, (checked, wrong) in checked_keys.items() if wrong is None}
        inner = keys_within(value)
        if inner:
            fix = f"without `{key}`, at the left edge: {as_lines(inner)}"
            error = ConfigError(error.what, code=error.code, fix=fix, changes={key: None, **inner})
        elif fitting.keys() != stands_for.keys() or "." in key:  # a dot in a change is a place inside
            error.changes = {}
        self.refuse(error, key)
        for new, checked in fitting.items():
            self.values[SPELLINGS.get(new, new)] = checked
            self.spelled.setdefault(SPELLINGS.get(new, new), key)

    def rewards(self) -> tuple[RewardSpec, ...]:
        """TRL's order: the reward model first, then the functions."""
        reader = RewardReader(folder=self.document.folder, where=self.where)
        specs: tuple[RewardSpec, ...] = ()
        if name := self.values.get("reward_model_name_or_path"):
            specs = (RewardSpec(name=name, function=name),)
        if entries := self.values.get("rewards"):
            specs += reader.read(entries, "rewards")
        self.problems += reader.problems
        return specs

    def agents(self) -> AgentSpec:
        """Tools, environments and the program, without those that are refused. Only files in which they are are run."""
        return AgentSpec(tools=self._tools(), environment=self._environment(), program=self._program())

    def _tools(self) -> tuple[Tool, ...]:
        written = self.values.get("tools")
        if not written:
            return ()
        from podium.agents.resolve import resolve_tools
        from podium.agents.tools import distinct

        found: tuple[Tool, ...] = ()
        for index, entry in enumerate(written if isinstance(written, list) else [written]):
            place: Place = ("tools", index) if isinstance(written, list) else ("tools",)
            try:
                if not isinstance(entry, (str, Mapping)) and not callable(entry):
                    raise ConfigError(f"a tool is a name, got `{entry}`", fix="tools: [tools.py:my_function]")
                found = distinct([*found, *resolve_tools([entry], self.document.folder)])
            except PodiumError as error:
                self.refuse(error, *place, code="C053")
        return found

    def _environment(self) -> Factory | Mapping[str, Factory] | None:
        written = self.values.get("environment")
        if not isinstance(written, Mapping):
            return self._factory(written, "environment") if written else None
        made = {str(name): self._factory(entry, "environment", name) for name, entry in written.items()}
        return {name: factory for name, factory in made.items() if factory is not None} or None

    def _factory(self, entry: Any, *place: str | int) -> Factory | None:
        """An environment, or several, chosen by the rows' column `environment`; nothing is played here."""
        from podium.agents.table import resolve_environment

        if callable(entry):
            return entry
        try:
            if not isinstance(entry, str):
                what = f"an environment is a name, got `{entry}`"
                raise ConfigError(what, fix="environment: game.py:Guess", spec=entry)
            return resolve_environment(entry, self.document.folder)
        except PodiumError as error:
            self.refuse(error, *place, code="C054")
            return None

    def _program(self) -> Program | None:
        written = self.values.get("agent")
        if not written:
            return None
        from podium.agents.table import resolve_program

        try:
            return resolve_program(written, self.document.folder)
        except PodiumError as error:
            self.refuse(error, "agent", code="C065")
            return None

    def lora(self) -> dict[str, Any] | None:
        """`lora:` as it is, or TRL's flat keys."""
        flat = {key: self.values[key] for key in FLAT_ADAPTER if key in self.values}
        own = self.values.get("lora")
        if own is not None:
            return self._checked_mapping(own, arguments("LoraConfig"), ("lora",))
        if not self.values.get("use_peft"):
            return None
        filled = {arg: flat.get(key, default) for key, (arg, default) in FLAT_ADAPTER.items()}
        if isinstance(filled["target_modules"], list) and len(filled["target_modules"]) == 1:
            filled["target_modules"] = filled["target_modules"][0]  # "all-linear" is a word, not a list
        return {arg: value for arg, value in filled.items() if value is not None}

    def _checked_mapping(self, values: Mapping[str, Any], types: Mapping[str, Any], place: Place) -> dict[str, Any]:
        """Keys and values of a mapping inside a recipe."""
        passed: dict[str, Any] = {}
        for key, value in values.items():
            if key not in types:
                unknown = unknown_key(key, types, value=value)
                unknown.changes = {k: new for k, new in unknown.changes.items() if new is None or k not in values}
                self._refuse_inside(unknown, *place, key)
                continue
            passed[key], error = check_type(key, value, types[key])
            if error := error or check_value(key, passed[key]):
                self._refuse_inside(error, *place, key)
        return passed

    def _refuse_inside(self, error: ConfigError, *place: str | int) -> None:
        """Refuse a key of a mapping. Its changes are made there, as `lora.r`; none are made in a list."""
        *outer, _ = place
        inside = ".".join(map(str, outer))
        listed = any(isinstance(part, int) for part in outer)
        error.changes = {} if listed else {f"{inside}.{key}": new for key, new in error.changes.items()}
        self.refuse(error, *place)

    def quantization(self) -> dict[str, Any] | None:
        """Arguments of `BitsAndBytesConfig`, made from flat keys as TRL does."""
        if self.values.get("load_in_4bit"):
            import torch

            from podium.trainer.config import has_bfloat16

            can = "bfloat16" if torch.cuda.is_available() and has_bfloat16() else "float32"
            return {
                "load_in_4bit": True,
                "bnb_4bit_compute_dtype": self.values.get("dtype", can),
                "bnb_4bit_quant_type": self.values.get("bnb_4bit_quant_type", "nf4"),
                "bnb_4bit_use_double_quant": self.values.get("use_bnb_nested_quant", False),
                "bnb_4bit_quant_storage": self.values.get("bnb_4bit_quant_storage"),
            }
        return {"load_in_8bit": True} if self.values.get("load_in_8bit") else None

    def data(self) -> DataSpec:
        """The sources of rows; files that are named must be there. Paths are relative to the working directory."""
        mixture = []
        for index, part in enumerate(self.values.get("datasets") or []):
            mixture.append(self._checked_mapping(part, arguments("DatasetConfig"), ("datasets", index)))
            if "path" not in mixture[-1]:
                self.refuse(_no_path("datasets"), "datasets", index)
        named = {key: from_here(self.values.get(key), self.document.folder) for key in ("dataset", "eval_dataset")}
        dataset = named["dataset"]
        for key, name in named.items():
            if isinstance(name, str):
                self._check_exists(name, key)
        columns = self._columns(self.values)
        # a file written for `trl grpo` has its test split used when it asks for evaluation, and only then
        asked = "no" if self.values.get("eval_strategy", "no") == "no" else "needed"
        made: dict[str, Any] = {
            "dataset": None if isinstance(dataset, list) else dataset,
            "parts": self._parts(dataset, columns) if isinstance(dataset, list) else (),
            "datasets": tuple(mixture),
            "use_test_split": "if there" if self.spelled.get("dataset") == "dataset" else asked,
            "columns": columns,
            "filter": tuple(self._conditions()),
            "pass_rate": self._pass_rate(),
            "seed": next((self.values[key] for key in ("data_seed", "seed") if self.values.get(key) is not None), 42),
        }
        names = [part.name for part in fields(DataSpec)]
        values = {**self.values, **named}
        given = {name: values[name] for name in names if values.get(name) is not None}
        spec = DataSpec(**{**given, **made})
        number = self.values.get("examples")
        return self._with_examples(spec, number) if isinstance(number, int) and number else spec

    def _with_examples(self, spec: DataSpec, number: int) -> DataSpec:
        """The spec with rows of its own as examples, which are then neither trained on nor held out."""
        if spec.parts or spec.datasets:
            return spec  # which is refused as a whole
        [part] = spec.all_parts
        try:
            rows = first_rows(spec, part, LOOKED_AT)
            taken = worked_examples(
                rows, spec.columns, number, held_out=spec.held_out or 0.0, in_tags=_wants_tags(self.values)
            )
        except DataError as error:
            if error.code == "D052":
                self.refuse(error, "examples")
            return spec  # data that cannot be read is reported elsewhere
        self.taken = tuple(taken.values())
        return replace(spec, columns=replace(spec.columns, examples=self.taken))

    def _columns(self, values: Mapping[str, Any], *place: str | int) -> Columns:
        """The templates of a dataset, or of one part of a mixture at `place`."""
        given = {part.name: values[part.name] for part in fields(Columns) if values.get(part.name) is not None}
        examples = values.get("examples")
        written = tuple(examples) if isinstance(examples, list) else ()
        made = Columns(**{**given, "examples": written, "may_lack_prompt": "environment" in self.values})
        rest: dict[str, Any] = {}
        for error in made.problems():
            key = error.settings[0]
            rest[key] = () if key == "examples" else None
            self.refuse(error, *place, key)
        return replace(made, **rest)  # what is left can still be checked

    def _parts(self, entries: list[Any], columns: Columns) -> tuple[DatasetSpec, ...]:
        """A list under `dataset`; templates that a part leaves out are those of the recipe."""
        parts = []
        for index, entry in enumerate(entries):
            own = entry if isinstance(entry, Mapping) else {"path": entry}
            checked = self._checked_mapping(own, PART_TYPES, ("dataset", index))
            if not isinstance(checked.get("path"), str):
                self.refuse(_no_path("dataset"), "dataset", index)
                continue
            if (weight := checked.get("weight")) is not None and not weight > 0:
                negative = ConfigError(f"`weight` must be above 0, got {weight:g}", code="C016", fix="weight: 1")
                self.refuse(negative, "dataset", index, "weight")
            self._check_exists(checked["path"], "dataset", index)
            self._columns(checked, "dataset", index)
            parts.append(checked)
        return read_parts(parts, columns)

    def _pass_rate(self) -> tuple[float, float] | None:
        """Two shares, the lower one first."""
        bounds = self.values.get("pass_rate")
        return (bounds[0], bounds[1]) if bounds is not None and is_share(bounds) else None

    def _conditions(self) -> Iterator[Condition]:
        written = self.values.get("filter") or []
        for text in written if isinstance(written, list) else [written]:
            try:
                yield parse_condition(text)
            except ValueError as error:
                self.refuse(ConfigError(f"`filter`: {error}", code="C061", fix="filter: level <= 2"), "filter")

    def _check_exists(self, name: str, *place: str | int) -> None:
        folder = self.document.folder
        try:
            if found := IN_FILE.fullmatch(name):
                find_file(found["file"], folder)
            check_exists(name, str(place[0]))
        except PodiumError as error:
            places = () if "size" in error.facts else (folder, *folder.resolve().parents)
            near = next((x for x in places if (x / name).exists()), None)
            if error.code == "D025" and near is not None:  # the recipe's folder, or that in which a run was started
                what = f"There is no file or folder {name} as seen from here; there is one as seen from {near}."
                recipe = Path(os.path.relpath(folder / Path(self.document.name).name, near)).as_posix()
                fix = f"cd {shlex.quote(str(near))}, then the same command with {recipe}"
                error = DataError(what, code="D025", fix=fix)
            self.refuse(error, *place, code="D056")

    def model(self) -> str:
        """The model; empty where there is none, or a folder that is named as seen from the recipe."""
        name = str(self.values.get("model") or "")
        folder = self.document.folder
        if not name or Path(name).expanduser().exists() or not (folder / name / "config.json").is_file():
            return name
        near = Path(os.path.relpath(folder / name)).as_posix()
        missing = ConfigError(
            f"There is no folder {name} as seen from here; there is one as seen from {folder}.",
            code="M001",
            fix=as_line("model", near if near.startswith((".", "/")) else f"./{near}"),
        )
        self.refuse(missing, "model")
        return ""

    def model_settings(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` that have a key of their own."""
        names = {"model_revision": "revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
        return {arg: self.values[key] for key, arg in names.items() if self.values.get(key) is not None}

    def config(self, rewards: tuple[RewardSpec, ...]) -> dict[str, Any]:
        """Arguments of `GRPOConfig`: given keys, weights out of `rewards`, and a folder named after the recipe."""
        config = {key: value for key, value in self.values.items() if key in config_keys()}
        config.pop("resume_from_checkpoint", None)
        config.setdefault("output_dir", f"runs/{Path(self.document.name).stem}")
        if settings := self.model_settings():
            own = config.get("model_init_kwargs") or {}
            config["model_init_kwargs"] = {**settings, **own} if isinstance(own, Mapping) else own
        if self.values.get("order") is not None:
            config["shuffle_dataset"] = False
        if any(spec.weight is not None for spec in rewards):
            config["reward_weights"] = [1.0 if spec.weight is None else float(spec.weight) for spec in rewards]
        if any(spec.adaptive for spec in rewards):
            named = zip(distinct_names([callable_name(spec.function) for spec in rewards]), rewards, strict=True)
            config["adaptive_rewards"] = {name: spec.adaptive for name, spec in named if spec.adaptive}
        return config

    def check_needed(self, rewards: tuple[RewardSpec, ...], *, needs_rewards: bool = True) -> None:
        """Keys that a recipe cannot do without. Silent where the key is there and wrong, which is a problem already."""
        given = {**self.document.values, **self.overrides}
        written = {SPELLINGS.get(key, key) for key, value in given.items() if value is not None}
        has_rewards = {"rewards", "reward_model_name_or_path"} & written and (rewards or self.problems)
        plays = "environment" in written  # it may make the prompts and the rewards, which a check finds out
        has_rows = {"dataset", "datasets"} & written or (plays and "max_steps" in written)
        rows = "max_steps: 50, since an environment that makes the prompts has no epochs; or dataset: FILE"
        for key, there, fix in (
            ("model", "model" in written, as_line("model", BUILTIN)),
            ("dataset", has_rows, rows if plays else "dataset: builtin:additions, or a file"),
            (
                "rewards",
                has_rewards or plays or "agent" in written or not needs_rewards,
                "rewards: [my_rewards.py:my_function]",
            ),
        ):
            if not there:
                error = ConfigError(f"no `{key}`", code="C031", fix=fix, missing=key)
                self.problems.append(mistake(self.document.name, error))
        unknown = unknown_accuracy(self.values.get("accuracy"), [callable_name(spec.function) for spec in rewards])
        if unknown is not None and not plays and self.values.get("accuracy") != "agent":
            self.refuse(unknown, "accuracy")


def _wants_tags(values: Mapping[str, Any]) -> bool:
    """Whether a reward of the library reads the answer in `<answer>` tags alone."""
    entries = values.get("rewards")
    entries = entries if isinstance(entries, list) else [entries]
    names = {entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries}
    return bool(names & {"answer_format", "answer_correct"})
