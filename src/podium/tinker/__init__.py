"""A local server of Tinker's protocol: its public client trains a policy of this machine, by `podium.Loop` alone.

`wire` reads and writes what is sent, `policy` answers it by a loop, `server` takes requests and lets them wait.
"""
