"""Real clients in front of a real proxy: each client times each scenario, judged by what reached the server.

`pytest contrib/clients` runs the matrix. Nothing here is collected or installed without being asked for.
"""
