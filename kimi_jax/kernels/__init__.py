"""GPU kernels (Pallas), each beside the op in `ops` that it stands in for, and what several of them share.

KDA: delta_step, delta_step_hopper (both gates), delta_chunks (delta_inputs, delta_within).
MLA: mla_decode, mla_decode_hopper (mla_decode_roles, mla_decode_warps), mla_prefill.
Experts: route; experts_one; experts_few, experts_many (experts_product, experts_order); experts_few_packed; fp4.
All: project_few, norm. approximate: fast instructions. device: which GPU they are for. Ops and kernels are one floor.
"""
