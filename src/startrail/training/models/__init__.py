"""A GPT and a DiT that take attention as an argument, so that they run on one process or sequence-parallel.

May import ``planner``, whose files have the named models. Start reading at ``gpt``, then ``dit``. ``configs`` has the
sizes as data, without torch; ``transformer`` has what both models share.
"""
