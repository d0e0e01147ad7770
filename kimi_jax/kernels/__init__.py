"""GPU kernels (Pallas), each beside the op in `ops` that it stands in for, and what several of them share.

KDA: delta_step, delta_step_hopper, delta_chunks (delta_inputs, gates).
MLA: mla_decode, mla_decode_hopper (mla_decode_roles), mla_prefill.
Experts: route, experts_few, experts_many (experts_product, fp4). norm. device: which GPU they are for.
"""
