"""Code of others: run where it can be killed, held in a sandbox, or waited for in a thread.

`functions` calls functions of the user, `workers` are the processes for it, and `child` is such a process from within.
`reward_calls` and `reward_results` are for reward functions. `forked` runs a function in a copy of this process,
`threads` in one of its threads. A worker imports nothing heavy that its target does not, so that no module here imports
more than the standard library, `podium.errors`, and what lies beside it.
"""
