"""One file a command of `python -m kimi_jax`: its first line says what it does; `arguments` and `run` do it."""
