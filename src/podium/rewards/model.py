"""A reward model (sequence classification with one label) as an ordinary reward function.

torch and transformers are imported when the model is used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.data.prompts import apply_template
from podium.errors import ConfigError, ModelError
from podium.errors.texts import as_line, quoted
from podium.models.check import check_model_name, read_config, stored_entries


class RewardModel:
    """Scores `prompt + completion` with a sequence classifier: its first logit, as in TRL.

    `model` is a name or folder, loaded on first use, or a module. Conversations go through the chat template of the
    reward model's own tokenizer. Sequences are padded on the right and no special tokens are added.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        model_init_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        device: Any = None,
        batch_size: int = 16,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.model_init_kwargs = dict(model_init_kwargs or {})
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.device = device
        self.batch_size = batch_size
        self.__name__ = self.name_of(model)
        self._loaded = False

    @staticmethod
    def name_of(model: Any) -> str:
        """The last part of the model's name; the class where a module has none.

        >>> RewardModel.name_of("org/reward-model")
        'reward-model'
        """
        name = model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", ""))
        return name.rstrip("/").split("/")[-1] or type(model).__name__

    def load(self) -> RewardModel:
        """Loads what was given by name, and prepares the padding. Raises `ModelError` or `ConfigError`."""
        if self._loaded:
            return self
        if isinstance(self.model, str):
            self.model = self._load_model(self.model)
        self._prepare_tokenizer()
        # The classifier reads the last token that is not padding, so both must mean the same id.
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        if self.device is not None and not hasattr(self.model, "hf_device_map"):
            self.model.to(self.device)
        self.model.eval()
        self._loaded = True
        return self

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """One score per completion."""
        import torch

        self.load()
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            inputs = self.tokenizer(
                text=texts[start : start + self.batch_size],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            ).to(next(self.model.parameters()).device)
            self._check_positions(inputs["input_ids"].shape[1], 0)
            with torch.inference_mode():
                scores += self.model(**inputs).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return str(prompt + completion)
        return apply_template(self.tokenizer, [*prompt, *completion], settings=self.chat_template_kwargs)

    def _load_model(self, name: str) -> Any:
        from transformers import AutoModelForSequenceClassification

        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1, output_loading_info=True, **self.model_init_kwargs
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"reward model `{name}` could not be loaded: {quoted(error)}\nA reward given as a string is "
                "the name or folder of a sequence classifier; a reward from the library is a function: "
                f"`from podium.rewards import {self.__name__}`, if there is one of that name.",
                settings=(name,),
                name=name,
                error=error,
                owner=self.__name__,
            ) from error
        if info["missing_keys"]:
            raise self._no_score(f"its weights have no `{sorted(info['missing_keys'])[0]}`, which would be random")
        return model

    def _no_score(self, why: str) -> ModelError:
        """The error of a model that is no sequence classifier with one label."""
        return ModelError(
            f"`{self.__name__}` is not a reward model: {why}.",
            code="M013",
            fix="the name or folder of a sequence classifier with one label (`...ForSequenceClassification`)",
            owner=self.__name__,
            why=why,
        )

    def check(self, prompts: Sequence[Any], max_completion_length: int) -> None:
        """Check, before weights are loaded, that the model is there, has one score, and can read the prompts.

        Raises `ModelError`, also for prompts that leave completions no positions.
        """
        if isinstance(self.model, str):
            self._check_files(self.model)
        self._prepare_tokenizer()
        if not self.tokenizer.chat_template and not all(isinstance(prompt, str) for prompt in prompts):
            raise ModelError(
                f"the prompts are conversations, and the tokenizer of reward model `{self.__name__}` has no template",
                code="M004",
                fix="take a reward model with a chat template, or write the prompts as plain text",
                owner=self.__name__,
            )
        lengths = [len(self.tokenizer(self._text(prompt, prompt[:0]))["input_ids"]) for prompt in prompts]
        self._check_positions(max(lengths, default=0), max_completion_length)

    def _check_files(self, name: str) -> None:
        trust = bool(self.model_init_kwargs.get("trust_remote_code"))
        try:
            check_model_name(name, needs_tokenizer=self.tokenizer is None, trust_remote_code=trust, generates=False)
        except ModelError as error:
            own = "the name or folder of a sequence classifier with one label; a function is `file.py:function`"
            fix = own if error.code in ("M001", "M002") else error.fix  # the policy's is not a reward model's
            raise ModelError(f"reward model: {error.what}", code=error.code, fix=fix, what=error.what) from error
        config = read_config(name, revision=self.model_init_kwargs.get("revision"), trust_remote_code=trust)
        entries = stored_entries(Path(name).expanduser())
        shapes = {tensor: tuple(entry["shape"]) for tensor, entry in entries.items()}
        try:
            head = _head(config, trust=trust) if shapes else {}
        except ValueError as error:
            raise self._no_score(
                f"transformers has no sequence classifier of the kind `{config.model_type}`"
            ) from error
        missing = [tensor for tensor in head if tensor not in shapes]
        if missing:
            kind = ", ".join(config.architectures or [config.model_type])
            raise self._no_score(f"its weights ({kind}) have no `{missing[0]}`, which would be random")
        labels = [shapes[tensor][0] for tensor, shape in head.items() if shapes[tensor] != shape]
        if labels:
            raise self._no_score(f"it has {labels[0]} labels; a reward is one number")

    def _check_positions(self, prompt_length: int, completion_length: int) -> None:
        config = self._config if isinstance(self.model, str) else self.model.config
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and prompt_length + completion_length > positions:
            what = (
                f"reward model `{self.__name__}` reads {positions:,} tokens, and a prompt with its completion has "
                f"{prompt_length + completion_length:,}"
            )
            room = positions - prompt_length
            fix = "take a reward model with more positions, or shorter prompts"
            fix = as_line("max_completion_length", room) if completion_length and room > 0 else fix
            raise ModelError(what, code="D015", fix=fix)

    @functools.cached_property
    def _config(self) -> Any:
        return read_config(self.model, **self._source_settings())

    def _source_settings(self) -> dict[str, Any]:
        names = ("revision", "trust_remote_code")
        return {name: self.model_init_kwargs[name] for name in names if name in self.model_init_kwargs}

    def _prepare_tokenizer(self) -> None:
        """The tokenizer that was given, or the model's own, with a padding token."""
        if self.tokenizer is None:
            from transformers import AutoTokenizer, PreTrainedModel

            model = self.model
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
            if not (isinstance(model, (str, PreTrainedModel)) and name):
                raise ConfigError(
                    f"the reward model `{self.__name__}` has no name to load its tokenizer from; pass the tokenizer in "
                    "`reward_processing_classes`.",
                    owner=self.__name__,
                )
            self.tokenizer = AutoTokenizer.from_pretrained(name, **self._source_settings())
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token


def _head(config: Any, *, trust: bool) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of what stands on the trunk of a classifier with one label."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config = type(config).from_dict({**config.to_dict(), "num_labels": 1})
    with torch.device("meta"):
        made = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust)
    trunk = f"{made.base_model_prefix}."
    return {name: tuple(parameter.shape) for name, parameter in made.named_parameters() if not name.startswith(trunk)}
