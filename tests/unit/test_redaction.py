"""Secrets are found by their names, places and forms; everything else stays readable."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest

from podium.models.builtin import BUILTIN, resolve_model
from podium.runs.redaction import HIDDEN, hide, line_of_secret, without_secrets

LETTERS = string.ascii_letters + string.digits
SMALL = string.ascii_lowercase + string.digits
_chance = random.Random(7)


def drawn(length: int, alphabet: str = LETTERS) -> str:
    """A random text in which every kind of character of the alphabet occurs, as in a key that a service made."""
    while True:
        text = "".join(_chance.choices(alphabet, k=length))
        kinds = (str.isupper, str.islower, str.isdigit)
        if all(any(map(kind, text)) == any(map(kind, alphabet)) for kind in kinds) and text[0].isalpha():
            return text


def signed(claims: dict[str, Any]) -> str:
    parts = (json.dumps({"alg": "HS256", "typ": "JWT"}).encode(), json.dumps(claims).encode(), drawn(32).encode())
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


S = drawn(24)
BASIC = base64.b64encode(f"ana:{drawn(10)}".encode()).decode()
# name of the argument, its value, the part of it that must not be read
SECRETS: dict[str, tuple[str, Any, str]] = {
    # by what they are called, whatever they look like
    "accessToken": ("accessToken", "open sesame", "sesame"),
    "clientSecret": ("clientSecret", "open sesame", "sesame"),
    "refreshToken": ("refreshToken", "abc", "abc"),
    "apiKey": ("apiKey", "abc", "abc"),
    "APIKey": ("APIKey", "abc", "abc"),
    "OPENAI_API_KEY": ("OPENAI_API_KEY", "abc", "abc"),
    "x-api-key": ("x-api-key", "abc", "abc"),
    "userPassword": ("userPassword", "tulip", "tulip"),
    "db.password": ("db.password", "tulip", "tulip"),
    "passphrase": ("passphrase", "blue tulip", "tulip"),
    "a password of digits": ("password", 47110815, "47110815"),
    "cred": ("cred", "abc", "abc"),
    "dbCreds": ("dbCreds", "abc", "abc"),
    "session": ("session", "abc", "abc"),
    "sessionId": ("sessionId", "abc", "abc"),
    "otp": ("otp", "551203", "551203"),
    "otp as a number": ("otp", 551203, "551203"),
    "pin": ("pin", 4711, "4711"),
    "cookie": ("cookie", "id=abc", "abc"),
    "signature": ("signature", "abc", "abc"),
    "jwt": ("jwt", "abc", "abc"),
    "private key": ("private key", "abc", "abc"),
    "signingKey": ("signingKey", "abc", "abc"),
    "a list of tokens": ("tokens", ["abc", "def"], "def"),
    "auth": ("auth", "ana:tulip", "tulip"),
    # by where they stand
    "password in an address": ("url", f"https://ana:{S}@example.org/v1", S),
    "sig in an address": ("url", "https://example.org/a?sv=1&sig=Ab%2F9&n=2", "Ab%2F9"),
    "X-Amz-Signature": ("url", "https://example.org/a?X-Amz-Signature=0a1b2c3d&n=2", "0a1b2c3d"),
    "access_token in an address": ("url", "https://example.org/a#access_token=tulip&n=2", "tulip"),
    "key in an address": ("url", "https://example.org/a?key=tulip", "tulip"),
    "code in an address": ("url", "https://example.org/a?client_secret=tulip", "tulip"),
    "Bearer": ("line", f"Authorization: Bearer {S}", S),
    "Basic": ("line", f"Authorization: Basic {BASIC}", BASIC),
    "Basic in a value": ("header", f"Basic {BASIC}", BASIC),
    "Token": ("header", f"Token {S}", S),
    "a flag": ("command", "serve --api-key tulip7 --port 8000", "tulip7"),
    "a flag with =": ("command", "serve --password=tulip7 --port 8000", "tulip7"),
    "a variable": ("command", "HF_TOKEN=tulip7 python run.py", "tulip7"),
    "JSON in a text": ("body", '{"model": "m", "apiKey": "tulip7"}', "tulip7"),
    "YAML in a text": ("body", "model: m\nclient_secret: tulip7\n", "tulip7"),
    "a webhook": ("url", f"https://hooks.example.org/services/T01ABCDEF/B01ABCDEF/{S}", S),
    # by what they look like, under any name
    "JWT": ("value", signed({"sub": "ana", "admin": True}), "eyJ"),
    "a key of 24 letters and digits": ("value", drawn(24), ""),
    "a key of 32 letters and digits": ("value", drawn(32), ""),
    "a key of 48 small letters and digits": ("value", drawn(48, SMALL), ""),
    "40 characters as AWS writes them": ("value", drawn(40, LETTERS + "/+"), ""),
    "nvapi-": ("value", f"nvapi-{drawn(60)}", ""),
    "hf_": ("value", f"hf_{drawn(34, string.ascii_letters)}", ""),
    "sk-": ("value", f"sk-proj-{drawn(48)}", ""),
    "ghp_": ("value", f"ghp_{drawn(36)}", ""),
    "glpat-": ("value", f"glpat-{drawn(20)}", ""),
    "AKIA": ("value", f"AKIA{drawn(16, string.ascii_uppercase + string.digits)}", ""),
    "gsk_": ("value", f"gsk_{drawn(52)}", ""),
    "r8_": ("value", f"r8_{drawn(37)}", ""),
    "xoxb-": ("value", f"xoxb-{drawn(12, string.digits + 'a')}-{drawn(24)}", ""),
    "base64": ("value", base64.b64encode(drawn(48).encode()).decode(), ""),
    "in a sentence": ("note", f"use {S} for now", S),
    "PEM": ("pem", f"-----BEGIN PRIVATE KEY-----\n{S}\n-----END PRIVATE KEY-----", S),
    "deep inside": ("args", {"a": [{"b": {"clientSecret": "tulip7"}}]}, "tulip7"),
}

INNOCENT: dict[str, Any] = {
    "num_tokens": 5,
    "max_completion_length": 256,
    "pad_token": "</s>",
    "eos_token": "<|im_end|>",
    "tokenizer": "Qwen/Qwen2.5-0.5B-Instruct",
    "model": "unsloth/DeepSeek-R1-Distill-Qwen-1.5B-unsloth-bnb-4bit",
    "model_gguf": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "model_class": "Qwen3MoeForCausalLM",
    "quantized": "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ",
    "path": "/home/ana/projects/podium/runs/2026-11-24-sums-grpo/checkpoint-1200",
    "windows_path": r"C:\Users\ana\Documents\Projects\GRPO\run7.yaml",
    "cache": "/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B-Instruct/snapshots",
    "sha256": hashlib.sha256(b"data").hexdigest(),
    "revision": hashlib.sha1(b"data").hexdigest(),
    "md5": hashlib.md5(b"data").hexdigest(),
    "digest": "sha256:" + hashlib.sha256(b"image").hexdigest(),
    "uuid": "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "prompt": "What is 12 + 30? Answer with the number alone.",
    "system": "You are a careful assistant. Think step by step, then write <answer>...</answer>.",
    "prompt_about_keys": "Explain what an API key is, and why a password should be long.",
    "prompt_with_a_colon": "Name the token: is it a noun or a verb?",
    "url": "https://example.org/v1/chat/completions?model=qwen&n=2",
    "url_with_port": "http://127.0.0.1:8000/v1",
    "url_with_fragment": "https://example.org/docs/page.html#section-12-settings",
    "repo": "https://github.com/someone/some-project/blob/main/README.md",
    "s3": "s3://bucket-name/datasets/2026/11/train-00000-of-00012.parquet",
    "file": "train-00000-of-00001-a09b74b3ef9c3b56.parquet",
    "pattern": r"(?i)\b(?:answer|choice|option)(?: is|:)\s*([^\n]*)",
    "api_key_env": "JUDGE_KEY",
    "key_column": "question",
    "keys": 7,
    "keywords": ["light", "water", "carbon dioxide"],
    "tokens": 200,
    "secretary": "Ana",
    "compass": "north",
    "spinner": "dots",
    "authors": ["Ana", "Bob"],
    "sessions": 3,
    "signal": "SIGTERM",
    "signature_columns": ["prompt", "answer"],
    "json": '{"type": "object", "required": ["answer"], "properties": {"answer": {"type": "integer"}}}',
    "formula": r"\frac{x_1^2 + 2x_1x_2}{\sqrt{3}} = 12",
    "code": "def add(first_number, second_number): return first_number + second_number",
    "long_word": "Donaudampfschifffahrtsgesellschaft",
    "camel": "GroupRelativePolicyOptimizationTrainer",
    "constant": "MAX_NUMBER_OF_CONCURRENT_REQUESTS_PER_PROCESS",
    "date": "2026-11-24T05:20:08.123456+00:00",
    "number": "3.141592653589793238462643383279",
    "dna": "ACGTACGTTAGCTAGCTAGGATCGATCGATCG",
    "schedule": "constant_with_warmup",
    "columns": "question,answer,choices,difficulty",
    "weights": [0.5, 1, 2],
    "none": None,
    "flag": True,
}


@pytest.mark.parametrize("form", SECRETS)
def test_a_secret_is_hidden(form: str) -> None:
    name, value, part = SECRETS[form]
    hidden = str(without_secrets({"rewards": [{"name": "judge", "args": {name: value}}]}))
    assert (part or str(value)) not in hidden
    assert HIDDEN in hidden
    assert "judge" in hidden


@pytest.mark.parametrize("name", INNOCENT)
def test_what_is_no_secret_stays(name: str) -> None:
    assert without_secrets({name: INNOCENT[name]}) == {name: INNOCENT[name]}


def test_there_are_enough_of_both() -> None:
    assert min(len(SECRETS), len(INNOCENT)) >= 40


def test_what_stands_around_a_secret_stays() -> None:
    assert hide("GET https://a.org/x?model=m&sig=abc&n=1 with Bearer " + S + ", twice") == (
        f"GET https://a.org/x?model=m&sig={HIDDEN}&n=1 with Bearer {HIDDEN}, twice"
    )


def test_random_keys_are_told_from_names() -> None:
    """Keys drawn a thousand times: at most one in a hundred stays readable."""
    read = sum(HIDDEN not in hide(drawn(length)) for length in (24, 32, 40) for _ in range(333))
    assert read <= 10


def test_long_texts_take_no_time() -> None:
    import time

    start = time.process_time()
    for text in (
        "a1B2" * 25_000,
        "key=" * 25_000,
        "eyJ." * 25_000,
        "-----BEGIN " * 9000,
        "a_" * 50_000,
        "://a" * 25_000,
    ):
        hide(text)
    assert time.process_time() - start < 5


@pytest.mark.slow
@pytest.mark.defect("OTpages", "podium push of the page: the vocabulary of the built-in model")
def test_a_vocabulary_holds_no_secret() -> None:
    text = Path(resolve_model(BUILTIN), "tokenizer.json").read_text(encoding="utf-8")
    assert line_of_secret(text) is None
    assert line_of_secret(f"{text}\npin: x9955y") is not None
