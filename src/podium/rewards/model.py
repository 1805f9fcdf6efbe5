"""A reward model (sequence classification with one label) as an ordinary reward function.

Knows tokenizers and one forward pass; torch and transformers are imported when the model is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import ConfigError, ModelError


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
        if self.tokenizer is None:
            self.tokenizer = self._load_tokenizer()
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
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
            with torch.inference_mode():
                scores += self.model(**inputs).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return str(prompt + completion)
        return str(
            self.tokenizer.apply_chat_template(
                [*prompt, *completion], **{**self.chat_template_kwargs, "tokenize": False}
            )
        )

    def _load_model(self, name: str) -> Any:
        from transformers import AutoModelForSequenceClassification

        try:
            return AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **self.model_init_kwargs)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"reward model `{name}` could not be loaded: {error}\n"
                "A reward given as a string is the name or folder of a sequence classifier; a reward from the library "
                f"is a function: `from podium.rewards import {self.__name__}`, if there is one of that name."
            ) from error

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer, PreTrainedModel

        name = getattr(self.model.config, "_name_or_path", "")
        if not isinstance(self.model, PreTrainedModel) or not name:
            raise ConfigError(
                f"the reward model `{self.__name__}` has no name to load its tokenizer from; "
                "pass the tokenizer in `reward_processing_classes`."
            )
        settings = {
            key: self.model_init_kwargs[key]
            for key in ("revision", "trust_remote_code")
            if key in self.model_init_kwargs
        }
        return AutoTokenizer.from_pretrained(name, **settings)
