"""Serves an installed environment of verifiers 0.4 (a taskset, a harness, a runtime) to `agent_verifiers.py`.

It runs in the interpreter in which verifiers is installed, and needs nothing of Podium:

    python verifiers_server.py rows marble-v1 --take 64 > marble.jsonl
    python verifiers_server.py serve marble-v1

Settings of the environment stand behind its name, in both commands: `taskset.pieces=2`, `agent.max_turns=4`.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import traceback
import uuid
from collections import Counter

import openai
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop with the tools of the task.

    verifiers' own loop, `null`, is a script for which `uv` downloads packages, and a process for each answer to a
    user. This one runs in the process of the server.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with (
            contextlib.AsyncExitStack() as stack,
            openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client,
        ):
            tools, names, connections = await connect_mcp(servers, stack)
            while True:
                reply = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or openai.omit
                )
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    result = await called(call.function, names, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


__all__ = ["ChatHarness"]  # how verifiers finds the harness `verifiers_server`


async def called(function, names, connections):
    """The result of a call, or what is wrong with it, for the model."""
    if function.name not in names:
        return f"error: there is no tool {function.name}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    return await call_mcp(connections, names, function.name, arguments)


def load_environment(name, settings):
    """The environment of an installed package, whose agents run on this machine with the harness above.

    A package that brings a harness of its own keeps it. `settings` are values of verifiers' configuration of the
    environment, as `taskset.pieces=2`.
    """
    has_harness = vf.default_harness_id(name) != "bash"
    config = {"taskset": {"id": name}}
    for field, described in vf.env_config_type(name).model_fields.items():
        if isinstance(described.default, vf.AgentConfig):
            config[field] = {"runtime": {"type": "subprocess"}}
            if not has_harness:
                config[field]["harness"] = {"id": "verifiers_server"}
    for setting in settings:
        path, _, value = setting.partition("=")
        *parents, last = path.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        try:
            place[last] = json.loads(value)
        except json.JSONDecodeError:
            place[last] = value
    return vf.load_environment(vf.resolve_env_config(config))


def print_rows(environment, server, take):
    """Tasks of the environment as rows of a dataset, one JSON object a line."""
    for task in itertools.islice(environment.taskset, take):
        system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
        user = {"role": "user", "content": task.data.prompt_text or task.data.name or ""}
        row = {"prompt": [*system, user], "task": task.data.model_dump_json(), "server": server}
        print(json.dumps(row))


async def play(environment, asked):
    """One episode: its weighted rewards, what it measured besides, and its errors."""
    variable = f"PODIUM_API_KEY_{uuid.uuid4().hex}"  # verifiers reads a key from a variable
    os.environ[variable] = asked["api_key"]
    client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
    task_type = type(environment.taskset).task_type()
    task = task_type(task_type.data_type().model_validate_json(asked["task"]), environment.config.taskset.task)
    context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
    try:
        episode = await environment.run_episode(task, context)
    finally:
        del os.environ[variable]
    rewards, metrics = Counter(), {}
    errors = [f"{error.type}: {error.message}" for error in episode.errors]
    for trace in episode.traces:
        if not trace.ok:
            errors += [f"{error.type}: {error.message}" for error in trace.errors]
        if not trace.agent.trainable and trace.agent.config.client == client and trace.calls:
            errors.append(f"the agent `{trace.agent.name}` is not to be trained: give it a client of its own")
        prefix = f"{trace.agent.name}/" if len(episode.traces) > 1 else ""
        for name, reward in trace.rewards.items():
            if reward is not None and reward.weight:
                rewards[prefix + name] += reward.value
            elif reward is not None:
                metrics[prefix + name] = reward.score
        metrics |= {prefix + name: value for name, value in trace.metrics.items()}
    return {"rewards": rewards, "metrics": metrics, "errors": errors}


async def serve(environment, port):
    """Play an episode for each request, until the process is ended."""

    async def answer(request):
        try:
            played = await play(environment, json.loads(await request.read()))
        except Exception as error:  # noqa: BLE001  a task of another environment, for example; the program raises it
            traceback.print_exc()
            played = {"errors": [f"{type(error).__name__}: {error}"]}
        return web.json_response(played)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/", answer)
    async with environment.serving():
        runner = web.AppRunner(app, handler_cancellation=True)  # an episode that is given up ends here too
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print(f"serving at http://127.0.0.1:{port}", flush=True)
        await asyncio.Event().wait()


def main():
    """Print rows of an environment, or serve it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["rows", "serve"])
    parser.add_argument("name", help="the id of an installed taskset, as marble-v1")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--take", type=int, default=100, help="rows to print")
    parser.add_argument("--port", type=int, default=8801)
    given = parser.parse_args()
    environment = load_environment(given.name, given.settings)
    if given.verb == "rows":
        print_rows(environment, f"http://127.0.0.1:{given.port}", given.take)
    else:
        asyncio.run(serve(environment, given.port))


if __name__ == "__main__":
    main()
