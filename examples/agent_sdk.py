"""An agent of the OpenAI Agents SDK with a tool: it asks for the weather and says whether an umbrella is needed.

    pip install openai-agents
    podium train examples/agent_sdk.yaml

`run` is an ordinary agent with its worked examples; only its address and key are Podium's.
"""

import random

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI, RateLimitError

set_tracing_disabled(True)
STARTS, ENDINGS = "Ash Bar Cold Dun East Hart Mill New Ox Ply Red Stan", "ton burg ville ford field mouth ham wick"


def rows():
    """Towns with the weather that the tool will find there: nobody can know it without the tool."""
    towns = random.Random(0).sample([start + ending for start in STARTS.split() for ending in ENDINGS.split()], 96)
    for i, town in enumerate(towns):
        yield {"prompt": f"Do I need an umbrella in {town}?", "town": town, "weather": ("rain", "sun")[i % 2]}


def worked(town, weather, answer):
    """A question with its call, its result and its answer, as items of the Responses API."""
    return [
        {"role": "user", "content": f"Do I need an umbrella in {town}?"},
        {"type": "function_call", "call_id": town, "name": "get_weather", "arguments": f'{{"town": "{town}"}}'},
        {"type": "function_call_output", "call_id": town, "output": weather},
        {"role": "assistant", "content": answer},
    ]


async def run(base_url, api_key, row):
    """0.3 for asking about the town, and 1 in all for the right answer after it."""
    asked = []

    @function_tool
    def get_weather(town: str) -> str:
        """The weather in a town."""
        asked.append(town)
        return row["weather"] if town == row["town"] else "unknown"

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    agent = Agent(
        name="Weather",
        instructions="Ask for the weather. Then answer yes or no.",
        tools=[get_weather],
        model=OpenAIResponsesModel("policy", client),
        model_settings=ModelSettings(max_tokens=40),
    )
    talk = [*worked("Oslo", "rain", "yes"), *worked("Rome", "sun", "no"), {"role": "user", "content": row["prompt"]}]
    try:
        answer = (await Runner.run(agent, talk, max_turns=2)).final_output.strip()
    except (AgentsException, RateLimitError):  # a tool that is not there, too many turns or tokens
        answer = None
    called, right = row["town"] in asked, {"rain": "yes", "sun": "no"}[row["weather"]]
    return {"called": 0.1 * bool(asked) + 0.2 * called, "answer": 0.7 * (called and answer == right)}
