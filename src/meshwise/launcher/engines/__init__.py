"""Talk to batch schedulers: site settings, batch scripts, Slurm commands.

Torch is not imported.
"""
