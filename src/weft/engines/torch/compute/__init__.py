"""How a module computes.

activation_checkpoint.py  activations computed again in backward
compile_module.py         torch.compile in place
"""
