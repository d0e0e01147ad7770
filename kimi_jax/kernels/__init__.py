"""GPU kernels (Pallas), each beside the op in `ops` that it stands in for, and what several of them share.

KDA: delta_step (gates), delta_chunks (delta_inputs, delta_within, approximate).
MLA: mla_decode, mla_decode_hopper (mla_decode_roles), mla_prefill.
Experts: route, experts_few, experts_few_packed (fp4), experts_many (experts_order), experts_product.
All: project_few, norm. device: which GPU they are for.
"""
