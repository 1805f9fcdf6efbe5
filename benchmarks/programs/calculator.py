"""The agent of the recipe `calculator` as a program: the same tool, offered and run by a loop over the `openai` client.

It returns nothing, so that the recipe's reward functions score its conversation, as they do where the trainer runs the
tool.
"""

import json

from openai import OpenAI

from podium.agents.library.calculator import make

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="of each session", max_retries=0)
CALCULATE = make(folder=None)
PARAMETERS = {
    "type": "object",
    "properties": {
        "expression": {
            "type": "string",
            "description": 'Numbers, + - * / // % ** and parentheses, for example "(127 + 5) * 46".',
        }
    },
    "required": ["expression"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute the value of an arithmetic expression.",
        "parameters": PARAMETERS,
    },
}


def as_sent(messages):
    """The worked examples of a row as the API has them: arguments are JSON, and results name their call."""
    for i, message in enumerate(messages):
        calls = [
            {
                "id": f"call_{i}_{n}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for n, call in enumerate(message.get("tool_calls") or ())
        ]
        if calls:
            yield {"role": "assistant", "content": message["content"], "tool_calls": calls}
        elif message["role"] == "tool":
            yield {"role": "tool", "tool_call_id": f"call_{i - 1}_0", "content": message["content"]}
        else:
            yield dict(message)


def run(base_url, api_key, prompt):
    """Ask, compute what is to be computed, ask once more."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [*as_sent(prompt)]
    answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
    if not answer.tool_calls:
        return
    messages.append(answer)
    for call in answer.tool_calls:
        try:
            result = CALCULATE(**json.loads(call.function.arguments))
        except (ValueError, TypeError) as error:
            result = f"error: {error}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
