"""Prompts in, text out: `generate` and `stream`, what they take (prompting), hold (rows) and give back (completion)."""
