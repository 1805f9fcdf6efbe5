"""Sampling by vLLM, from a copy of the weights that is brought up to date before every generation round.

server.py     a running `vllm serve`: its routes, its silence, its death
weights.py    the policy's tensors under the names of a checkpoint, adapters merged
transfer.py   how they get there: a folder that both see, or NCCL
requests.py   prompts as requests, answers as completions
session.py    requests that may come at any time, and what becomes of them where the server dies
engine.py     `use_vllm` with `vllm_mode: server`: sync, generate, versions
colocate.py   the same with an engine in the trainer's process
connect.py    everything that is checked of a server before weights load
teacher.py    another model on a server, which judges tokens

Nothing imports it but `engines.table`, by the names of its modules.
"""
