"""A differential fuzzer: random models trained by plain Keras and under a guard, and what differs.

    grammar.py     a seed and a number → a configuration, a plain dict
    writing.py     a configuration → a script that needs nothing of this package
    parts.py       layers, losses, metrics and callbacks of one's own that scripts may use
    comparing.py   what a script does: trains both ways and compares
    shrinking.py   a configuration that fails → the smallest one that still does
    running.py     one configuration, in this process; a stretch of them, in child processes
    __main__.py    python -m fuzz --backend jax --minutes 10 --seed 3

What runs is the script itself, so a failure is always one that its script shows.
"""
