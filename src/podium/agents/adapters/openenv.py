"""OpenEnv's environments: `openenv:http://127.0.0.1:8000` (a server), `openenv:server.py:Maze` (its class, in process).

Actions and observations are records there. An action with one field is the turn itself, or its last number; an action
with several is a JSON object in it, and one with one field may be. `?action=message&observation=text` names the fields
to use.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
from pydantic import ValidationError

from podium.agents.plain_text import TextEnvironment
from podium.agents.table import from_file
from podium.data.query import as_json
from podium.errors import AgentError, ConfigError
from podium.errors.texts import listed, quoted


class NoAction(ValueError):
    """A text that is no action of the environment."""


class LocalBackend:
    """A server's `Environment` without the server, with the methods of OpenEnv's synchronous client."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.action: Any = typing.get_type_hints(type(environment).step).get("action")
        if not hasattr(self.action, "model_validate"):
            raise ConfigError(
                f"the `step` of OpenEnv's `{type(environment).__name__}` has no action class in its signature.",
                fix="write `def step(self, action: MyAction) -> MyObservation:`",
                kind=type(environment).__name__,
            )

    def reset(self, **arguments: Any) -> Any:
        """A reset with the arguments that the environment takes, as a server does."""
        parameters = inspect.signature(self._environment.reset).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        known = {name: value for name, value in arguments.items() if takes_all or name in parameters}
        return self._result(self._environment.reset(**known))

    def step(self, fields: dict[str, Any]) -> Any:
        """A step. Raises `NoAction` for fields that are no action."""
        try:
            action = self.action.model_validate(fields)
        except ValidationError as error:
            raise NoAction(str(error)) from error
        return self._result(self._environment.step(action))

    def _result(self, observation: Any) -> Any:
        from openenv.core.client_types import StepResult
        from openenv.core.env_server.serialization import serialize_observation

        return StepResult(**serialize_observation(observation))


class OpenEnv(TextEnvironment):
    """An environment of OpenEnv. A turn that is no action costs nothing and changes nothing, but is a turn."""

    def __init__(self, backend: Any, schema: Mapping[str, Any], action: str | None, observation: str | None) -> None:
        self._backend = backend
        self._observation = observation
        self._validator = jsonschema.Draft202012Validator(schema)
        self._fields = {
            name: described for name, described in schema.get("properties", {}).items() if name != "metadata"
        }
        self._field = action or (next(iter(self._fields)) if len(self._fields) == 1 else None)
        if self._field is not None and self._field not in self._fields:
            raise ConfigError(
                f"OpenEnv's action has no field `{action}`.",
                fix=f"one of {listed(self._fields)}",
                action=action,
                fields=self._fields,
            )

    def reset(self, seed: int | None = None, prompt: Any = None, **row: Any) -> str:
        """The first observation; for an action of several fields, how to write it."""
        observation = self._told(self._backend.reset(**row, **({} if seed is None else {"seed": seed})).observation)
        return (
            observation if self._field else f"{observation}\nAnswer with a JSON object with {', '.join(self._fields)}."
        )

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """One action."""
        try:
            result = self._backend.step(self._action(text))
        except (NoAction, RuntimeError) as error:  # a server's refusal is a RuntimeError
            if not isinstance(error, NoAction) and "VALIDATION_ERROR" not in str(error):
                raise
            return f"This is no action: {str(error)[:300]}", 0.0, False, {"invalid": True}
        reward = 0.0 if result.reward is None else float(result.reward)
        return self._told(result.observation), reward, bool(result.done), dict(result.metadata or {})

    def _action(self, text: str) -> dict[str, Any]:
        """The action in a turn. Raises `NoAction`."""
        found = as_json(text[text.find("{") : text.rfind("}") + 1])
        is_object = isinstance(found, dict) and (self._field is None or self._field in found)
        if self._field is None and not is_object:
            raise NoAction(f"write a JSON object with {', '.join(self._fields)}")
        if self._field is not None and not is_object:
            numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
            is_text = self._fields[self._field].get("type") not in ("integer", "number")
            if not (is_text or numbers):
                raise NoAction("there is no number in it")
            found = {self._field: text if is_text else as_json(numbers[-1])}
        wrong = jsonschema.exceptions.best_match(self._validator.iter_errors(found))
        if wrong is not None:
            raise NoAction(wrong.message)
        return found

    def _told(self, fields: Mapping[str, Any]) -> str:
        """The named field of an observation, its only text, or all of it as JSON."""
        if self._observation is not None:
            if self._observation not in fields:
                raise AgentError(
                    f"OpenEnv's observation has no field `{self._observation}`.",
                    fix=f"one of {listed(fields)}",
                    observation=self._observation,
                    fields=fields,
                )
            return str(fields[self._observation])
        shown = {name: value for name, value in fields.items() if name != "metadata"}
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(shown) == len(texts) == 1 else json.dumps(shown, default=str)


def factory(
    name: str, folder: Path, /, *, action: str | None = None, observation: str | None = None, **arguments: Any
) -> Callable[[], OpenEnv]:
    """Makes environments of a class in a file (with its arguments), or sessions of a server."""
    if ".py:" in name:
        kind = from_file(name, folder)

        def in_process() -> OpenEnv:
            backend = LocalBackend(kind(**arguments))
            return OpenEnv(backend, backend.action.model_json_schema(), action, observation)

        return in_process
    if not name.startswith(("http://", "https://")):
        raise ConfigError(
            f"OpenEnv's environments are servers, or classes in a file; `{name}` is neither.",
            fix="environment: openenv:http://127.0.0.1:8000, or openenv:server.py:Maze",
            name=name,
        )
    return functools.partial(_session, name.rstrip("/"), action, observation)


def _session(url: str, action: str | None, observation: str | None) -> OpenEnv:
    import httpx
    from openenv.core.generic_client import GenericEnvClient

    try:
        schema = httpx.get(f"{url}/schema").raise_for_status().json()["action"]
        return OpenEnv(GenericEnvClient(base_url=url).sync().connect(), schema, action, observation)
    except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
        raise AgentError(
            f"there is no OpenEnv server at {url}: {type(error).__name__}: {quoted(error)}",
            fix="start it, or correct the address; MAX_CONCURRENT_ENVS limits its sessions",
            url=url,
            kind=type(error).__name__,
            error=error,
        ) from error
