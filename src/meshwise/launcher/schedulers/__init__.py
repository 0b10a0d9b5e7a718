"""Talk to batch schedulers: site settings, batch scripts, Slurm commands.

No torch.
"""
