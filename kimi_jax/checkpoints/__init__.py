"""Folders of weights: as the hub has them (hub_read, hub_write), as `kimi_jax.save` does (save_read, save_write).

`names` is the one table of tensors, read both ways; `folders` tells the two kinds apart; `states` keeps sequences.
"""
