"""How Hypothesis runs: no deadline for an example, because none shall depend on how busy the machine is."""

from hypothesis import settings

settings.register_profile("nsq_fast", deadline=None)
settings.load_profile("nsq_fast")
