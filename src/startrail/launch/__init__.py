"""Starts and joins ranks, watches their heartbeats and handles signals. Imports ``agreement`` only.

Start reading at ``local``: it forks ranks on this machine and collects their results.

- ``local``: forked ranks with gloo over loopback, which keeps the ranks of one machine off its network.
- ``torchrun``: ranks that torchrun started, also after a restart.
- ``heartbeat``: finds the rank that all others wait for.
- ``signals``: SIGTERM and Ctrl-C become a stop after the current step.
"""
