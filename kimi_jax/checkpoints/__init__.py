"""Folders of weights: names (one table, read both ways), safetensors, orbax, export."""
