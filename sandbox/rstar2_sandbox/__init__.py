"""Code execution and answer verification as a service: Redis queue, jailed children, typed results.

Nothing is imported here: the warm interpreters load this package, and every page they hold is paid for at each fork.
"""
