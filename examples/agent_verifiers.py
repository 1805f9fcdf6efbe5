"""An environment of verifiers 0.4 as an agent program: it is played on a server, through Podium's endpoint.

verifiers 0.4.0 needs mcp 2.0.0 and openai below 3, so `verifiers_server.py` runs in an interpreter of its own:

    python -m venv .venv-verifiers
    .venv-verifiers/bin/pip install verifiers==0.4.0 marble-v1
    .venv-verifiers/bin/python examples/verifiers_server.py rows marble-v1 --take 64 > examples/marble.jsonl
    .venv-verifiers/bin/python examples/verifiers_server.py serve marble-v1 &
    podium train examples/agent_verifiers.yaml
"""

import json
import urllib.error
import urllib.request


def run(base_url, api_key, row):
    """Play the row's task on the server that the row names.

    Returns the rewards by name, times their weights; None where the environment has scored nothing.
    """
    asked = {"base_url": base_url, "api_key": api_key, "task": row["task"]}
    request = urllib.request.Request(row["server"], json.dumps(asked).encode())
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
            played = json.load(response)
    except urllib.error.URLError as error:
        raise RuntimeError(f"no environment at {row['server']}: start `verifiers_server.py serve`") from error
    print(json.dumps(played))  # with what has no weight; it is recorded beside the completion
    if played["errors"]:
        raise RuntimeError(played["errors"][-1])
    return played["rewards"] or None
