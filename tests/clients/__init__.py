"""Real clients in front of a real proxy: each client times each scenario, judged by what reached the server.

`pytest -m clients` runs the matrix; `python -m tests.clients` prints it, and `--write` keeps it for docs/clients.md.
Nothing here is collected or installed without being asked for.
"""
