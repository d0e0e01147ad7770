"""Times beside what the machine allows.

machine: what it allows; floors: what a step needs of it; hits: which experts it reaches; timing: one measurement;
phases: where its time goes; bench: many, of one model (peer: the same by transformers); rank_slice: one rank of a large
group; scaling, crossing: all layouts of the devices here; kernels: the kernels alone. disk: loading and saving.
"""
